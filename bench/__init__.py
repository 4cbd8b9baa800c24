"""Times the model suites against plain JAX: `python -m bench --out gpu_nn.json`.

case.py           what one row measures, the options that select rows, the model behind a row
suites/           one module per suite: its matrix of cases and its model
moe_baselines.py  what the moe suite is compared with
step.py           forward and train_step, built from a model
check.py          error budget: no time without a passing check
measure.py        one case -> one row
machine.py        the device, versions and commit that a file names
store.py          the result file: read, continued, written after every row
report.py         tables
__main__.py       the command line

`python -m bench.attention_cpu` and `python -m bench.moe_cpu` time the attention and the expert
layer alone, on a CPU, in calls that take turns (interleaved.py).
"""

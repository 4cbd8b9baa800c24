"""The implementations of one case -> their rows: compile and check each, then time them in turns.

A round takes one sample of every implementation, so that whatever else the machine does meanwhile
slows all of them alike: the samples of a round belong together.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.case import Case, Problem
from bench.check import Checker, CheckFailed
from bench.step import jitted_step, next_params
from bench.suites import SUITES

SAMPLE_SECONDS = 0.05

Row = dict[str, Any]


@dataclass
class Timed:
    """A compiled step between its calls: what the next one is given, what the last one returned.

    `measured` is what its row says of it: the case and the number of parameters; `facts` what else
    is known before any timing.
    """

    measured: Row
    step: jax.stages.Compiled
    params: Any
    inputs: tuple[jax.Array, ...]
    outcome: Any
    compile_s: float
    facts: Row
    inner: int = 1
    samples_ms: list[float] = field(default_factory=list)

    def call(self) -> float:
        """Seconds per call, over `inner` calls in a row and one wait for all of them."""
        start = time.perf_counter()
        for _ in range(self.inner):
            self.outcome = self.step(self.params, *self.inputs)
            self.params = next_params(self.measured["op"], self.params, self.outcome)
        jax.block_until_ready(self.outcome)
        return (time.perf_counter() - start) / self.inner

    def choose_inner(self) -> None:
        """Sets `inner` by the time that calls take."""
        self.inner = calls_per_sample(self.call())
        if self.inner > 1:  # a single call includes the wait for it: ask again, of many
            self.inner = calls_per_sample(self.call())

    def row(self) -> Row:
        """The finished row; raises CheckFailed unless every value of the last outcome is finite."""
        if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(self.outcome)):
            raise CheckFailed("a value is not finite after the timed calls")
        q1, median, q3 = np.percentile(self.samples_ms, (25, 50, 75)).tolist()
        return {
            **self.measured,
            "finite": True,
            "compile_s": self.compile_s,
            "inner": self.inner,
            "median_ms": median,
            "q1_ms": q1,
            "q3_ms": q3,
            "samples_ms": self.samples_ms,
            **self.facts,
        }


def measure(cases: Sequence[Case], samples: int, checker: Checker) -> list[Row]:
    """The rows of cases that differ in the implementation only, in their order.

    Whatever goes wrong with one is its row's `error`, and never a time.
    """
    ready = [_prepare(case, checker) for case in cases]
    for _ in range(samples):
        ready = [_sampled(one) if isinstance(one, Timed) else one for one in ready]
    return [_finished(one) if isinstance(one, Timed) else one for one in ready]


def calls_per_sample(seconds: float) -> int:
    """How many calls of that length make a sample of about 50 ms, at least one."""
    return max(1, round(SAMPLE_SECONDS / seconds))


def _prepare(case: Case, checker: Checker) -> Timed | Row:
    """The case compiled, checked and warm; or the row of one that will have no times."""
    suite = SUITES[case["suite"]]
    reason = suite.unavailable(case, jax.default_backend())
    if reason is not None:
        return {**case, "skipped": reason}
    measured = dict(case)
    try:
        problem = suite.problem(case)
        measured["params"] = sum(x.size for x in jax.tree.leaves(problem.params))
        timed = _compiled_and_checked(measured, case, problem, checker)
        timed.choose_inner()
    except Exception as error:
        return _failed(measured, error)
    return timed


def _compiled_and_checked(measured: Row, case: Case, problem: Problem, checker: Checker) -> Timed:
    params = jax.tree.map(jnp.copy, problem.params)  # donated by a train_step
    start = time.perf_counter()
    jitted = jitted_step(problem.measured, case["op"], problem.learning_rate)
    lowered = jitted.lower(params, *problem.inputs)
    step = lowered.compile()
    outcome = jax.block_until_ready(step(params, *problem.inputs))
    return Timed(
        measured,
        step,
        next_params(case["op"], params, outcome),
        problem.inputs,
        outcome,
        compile_s=time.perf_counter() - start,
        facts={
            "path": _path(lowered.as_text()),
            **_memory(step),
            **checker.check(case, problem, outcome),
        },
    )


def _sampled(timed: Timed) -> Timed | Row:
    try:
        timed.samples_ms.append(1e3 * timed.call())
    except Exception as error:
        return _failed(timed.measured, error)
    return timed


def _finished(timed: Timed) -> Row:
    try:
        return timed.row()
    except CheckFailed as error:
        return _failed(timed.measured, error)


def _failed(measured: Row, error: Exception) -> Row:
    return measured | {"error": f"{type(error).__name__}: {error}"}


def _path(program: str) -> str:
    """What the lowered program really calls."""
    names = {"triton_kernel_call": "triton", "__cudnn": "cudnn"}
    return next((path for name, path in names.items() if name in program), "xla")


def _memory(step: jax.stages.Compiled) -> dict[str, int]:
    """What the program needs at once: arguments, results and temporaries, shared ones once."""
    stats = step.memory_analysis()
    if stats is None:  # the backend does not report it
        return {}
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return {"peak_memory_bytes": total - stats.alias_size_in_bytes}

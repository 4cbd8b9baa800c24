"""The scan of Mamba-2. The formulas and their source stand in `outputs.py` and `gradients.py`."""

from kernels_triton.ssd.gradients import ssd_d_C, ssd_d_inputs
from kernels_triton.ssd.outputs import ssd_outputs
from kernels_triton.ssd.states import ssd_chunk_states, ssd_pass_d_states, ssd_pass_states
from kernels_triton.ssd.steps import ssd_d_steps, ssd_steps

__all__ = [
    "ssd_chunk_states",
    "ssd_d_C",
    "ssd_d_inputs",
    "ssd_d_steps",
    "ssd_outputs",
    "ssd_pass_d_states",
    "ssd_pass_states",
    "ssd_steps",
]

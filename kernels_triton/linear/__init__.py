"""The linear recurrence h_t = a_t h_{t-1} + x_t, real or complex; `steps.py` says how it is cut."""

from kernels_triton.linear.gradients import linear_gradients
from kernels_triton.linear.outputs import linear_outputs
from kernels_triton.linear.states import linear_summaries

__all__ = ["linear_gradients", "linear_outputs", "linear_summaries"]

"""The selective scan. The formulas and their sources stand in `states.py` and `gradients.py`."""

from kernels_triton.selective.gradients import selective_gradients
from kernels_triton.selective.states import selective_starts, selective_states

__all__ = ["selective_gradients", "selective_starts", "selective_states"]

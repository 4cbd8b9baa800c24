"""The expert layer. The formulas and their sources stand in `forward.py` and `backward.py`."""

from kernels_triton.moe.backward import moe_d_hidden, moe_d_input
from kernels_triton.moe.forward import moe_combine, moe_gate_up

__all__ = ["moe_combine", "moe_d_hidden", "moe_d_input", "moe_gate_up"]

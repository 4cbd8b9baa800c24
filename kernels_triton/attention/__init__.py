"""Flash attention. The formulas and their sources stand in `forward.py` and `backward.py`.

`forward`, `backward` and `backward_query` are the bodies of the kernels; they take hooks, which
kernels that are written at run time pass.
"""

from kernels_triton.attention.backward import (
    attention_backward,
    attention_backward_key_value,
    backward,
)
from kernels_triton.attention.backward_query import attention_backward_query, backward_query
from kernels_triton.attention.forward import attention_forward, forward

__all__ = [
    "attention_backward",
    "attention_backward_key_value",
    "attention_backward_query",
    "attention_forward",
    "backward",
    "backward_query",
    "forward",
]

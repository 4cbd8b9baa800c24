"""Flash attention. The formulas and their sources stand in `forward.py` and `backward.py`."""

from kernels_triton.attention.backward import attention_backward, attention_backward_key_value
from kernels_triton.attention.backward_query import attention_backward_query
from kernels_triton.attention.forward import attention_forward

__all__ = [
    "attention_backward",
    "attention_backward_key_value",
    "attention_backward_query",
    "attention_forward",
]

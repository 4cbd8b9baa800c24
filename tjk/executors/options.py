"""How a launch's arguments are typed for Triton, and the compiler options that never vary."""

import numpy as np

_TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint32": "u32",
    "bool": "i1",
}


def pointer_type(dtype: np.dtype) -> str:
    """Triton's name of a pointer to elements of this dtype, such as "*bf16"."""
    return "*" + _TRITON_TYPES[np.dtype(dtype).name]

"""Activation functions and their derivatives."""

import triton
import triton.language as tl


@triton.jit
def activation(x, ACTIVATION: tl.constexpr):
    """a(x) and a'(x), for "silu", "gelu" (the tanh approximation) or "relu"."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(x)
        value = x * share
        slope = share + value * (1 - share)
    elif ACTIVATION == "gelu":
        # (1 + tanh(u)) / 2 is sigmoid(2 u), here with u = sqrt(2 / pi) (x + 0.044715 x^3).
        TWICE: tl.constexpr = 1.5957691216057308
        share = tl.sigmoid(TWICE * x * (1 + 0.044715 * x * x))
        value = x * share
        slope = share + value * (1 - share) * TWICE * (1 + 3 * 0.044715 * x * x)
    else:
        tl.static_assert(ACTIVATION == "relu")
        value = tl.maximum(x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    return value, slope

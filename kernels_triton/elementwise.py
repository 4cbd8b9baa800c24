"""Functions of scalars that Triton lacks, for code that is written from JAX programs."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """To a few units in the last place: near 0 by its series, elsewhere by the exponential."""
    square = x * x
    series = -0.00886323553 * square + 0.02186948854
    series = series * square - 0.05396825397
    series = series * square + 0.13333333333
    series = series * square - 0.33333333333
    near = x + x * square * series
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.4, near, tl.where(x < 0, -far, far))


@triton.jit
def logistic(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def log1p(x):
    """log(1 + x), exact near 0: the rounding of 1 + x is divided out again."""
    u = 1.0 + x
    rounded = u - 1.0
    scale = x / tl.where(rounded == 0, 1.0, rounded)
    return tl.where(rounded == 0, x, tl.where(u == float("inf"), u, tl.log(u) * scale))


@triton.jit
def expm1(x):
    """exp(x) - 1: near 0 by its series."""
    series = x * 0.00138888889 + 0.00833333333
    series = series * x + 0.04166666667
    series = series * x + 0.16666666667
    series = series * x + 0.5
    return tl.where(tl.abs(x) < 0.25, x + x * x * series, tl.exp(x) - 1.0)


@triton.jit
def sign(x):
    """-1, 0 or 1; NaN stays."""
    return tl.where(x > 0, 1, tl.where(x < 0, -1, x)).to(x.dtype)


@triton.jit
def power(x, y):
    """x^y for floats; of a negative x for integers y alone."""
    result = tl.exp2(y * tl.log2(tl.abs(x)))
    whole = tl.floor(y) == y
    odd = tl.floor(y * 0.5) != y * 0.5
    signed = tl.where(odd, -result, result)
    result = tl.where(x < 0, tl.where(whole, signed, float("nan")), result)
    result = tl.where((x == 0) & (y > 0), 0.0, result)
    return tl.where((y == 0) | (x == 1), 1.0, result)


@triton.jit
def round_even(x):
    """The nearest integer, the even one of two."""
    down = tl.floor(x)
    rest = x - down
    odd = tl.floor(down * 0.5) * 2.0 != down
    up = (rest > 0.5) | ((rest == 0.5) & odd)
    return tl.where(up, down + 1.0, down)


@triton.jit
def round_away(x):
    """The nearest integer, of two the one that is farther from 0."""
    down = tl.floor(tl.abs(x))
    size = tl.where(tl.abs(x) - down >= 0.5, down + 1.0, down)
    return tl.where(x < 0, -size, size)


@triton.jit
def add_at(x_ptr, offsets, value):
    """Adds to elements of an array, by atomics; `value` is summed where `offsets` do not vary."""
    offsets += tl.zeros([1, 1], tl.int32)
    if offsets.shape[0] == 1 and value.shape[0] > 1:
        value = tl.sum(value, axis=0, keep_dims=True)
    if offsets.shape[1] == 1 and value.shape[1] > 1:
        value = tl.sum(value, axis=1, keep_dims=True)
    tl.atomic_add(x_ptr + offsets, value, sem="relaxed")

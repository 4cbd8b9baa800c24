"""The inverse of a unit lower triangular matrix."""

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(system, N: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + system)^-1 of N strictly lower triangles (N, C, C), float32; C a power of two from 16.

    By halves: the corner of the inverse is minus the lower half's inverse times the system's corner
    times the upper half's; 16 rows are eliminated one by one. Every number on the way is an entry
    of some inverse or a product of two matrices of such, where powers of the system grow beyond
    bounds.
    """
    if C == 16:
        offs = tl.arange(0, 16)
        row, column = offs[None, :, None], offs[None, None, :]
        inverse = tl.zeros([N, 16, 16], tl.float32) + tl.where(row == column, 1.0, 0.0)
        for j in tl.range(15, disable_licm=True):
            factor = tl.sum(tl.where(column == j, system, 0.0), axis=2)
            pivot = tl.sum(tl.where(row == j, inverse, 0.0), axis=1)
            inverse -= factor[:, :, None] * pivot[:, None, :]
    else:
        H: tl.constexpr = C // 2
        left, right = _halves(system, N, C)
        upper, corner = _parts(left, N, H)
        _, lower = _parts(right, N, H)
        both = tl.permute(tl.join(upper, lower), (0, 3, 1, 2)).reshape(2 * N, H, H)
        both = unit_lower_inverse(both, 2 * N, H, PRECISION)
        upper, lower = tl.split(tl.permute(both.reshape(N, 2, H, H), (0, 2, 3, 1)))
        corner = tl.dot(corner, upper, input_precision=PRECISION)
        corner = -tl.dot(lower, corner, input_precision=PRECISION)
        left = tl.join(upper, corner)
        right = tl.join(tl.zeros_like(lower), lower)
        inverse = tl.permute(tl.join(left, right), (0, 3, 1, 4, 2)).reshape(N, C, C)
    return inverse


@triton.jit
def _halves(x, N: tl.constexpr, C: tl.constexpr):
    """The columns' halves of (N, C, C)."""
    return tl.split(tl.permute(x.reshape(N, C, 2, C // 2), (0, 1, 3, 2)))


@triton.jit
def _parts(x, N: tl.constexpr, H: tl.constexpr):
    """The rows' halves of (N, 2 H, H)."""
    return tl.split(tl.permute(x.reshape(N, 2, H, H), (0, 2, 3, 1)))

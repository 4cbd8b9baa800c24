"""Kernels for the interpreter executor, most of them wrong on purpose."""

import triton
import triton.language as tl


@triton.jit
def copy(x_ptr, n, y_ptr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """y = x, wrong by SHIFT elements where it reads, with a mask that lets it."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs + SHIFT, mask=offs < n), mask=offs < n)


@triton.jit
def fill(n, y_ptr, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes VALUE to the first n elements."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.full([BLOCK], VALUE, tl.float32), mask=offs < n)


@triton.jit
def add(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Adds x to what y holds, by atomics."""
    offs = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def masked_tail(x_ptr, n, y_ptr, BLOCK: tl.constexpr):
    """y = x, but what it masks it uses without having said what it is."""
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n))


@triton.jit
def product(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """c = a b in float32, of square matrices."""
    offs = tl.arange(0, SIZE)
    tile = offs[:, None] * SIZE + offs[None, :]
    c = tl.dot(tl.load(a_ptr + tile), tl.load(b_ptr + tile), input_precision=PRECISION)
    tl.store(c_ptr + tile, c)


@triton.jit
def convert(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """y = x in y's dtype."""
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs).to(y_ptr.dtype.element_ty))


@triton.jit
def scaled(x_ptr, scale, shift, y_ptr, BLOCK: tl.constexpr):
    """y = scale x + shift."""
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) * scale + shift)


@triton.jit
def row_sums(x_ptr, D, y_ptr, BLOCK: tl.constexpr):
    """y[b] = sum of row b. Grid: (B,)."""
    b = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + b * D + offs, mask=offs < D, other=0.0)
    tl.store(y_ptr + b, tl.sum(x, 0))

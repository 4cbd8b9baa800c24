"""Small kernels, each with one property that the compiler executor must see, and their launches."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from tjk.launch import Launch


@triton.jit
def matmul(
    a_ptr, b_ptr, M, alpha, c_ptr,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c = exp2(alpha a b), one tile a program. Grid: (M / BLOCK_M, N / BLOCK_N)."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_k = tl.arange(0, BLOCK_K)
    mask_m, mask_n = offs_m < M, offs_n < N
    c = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + offs_m * K + (k + offs_k)[None, :], mask=mask_m, other=0.0)
        b = tl.load(b_ptr + (k + offs_k)[:, None] * N + offs_n, mask=mask_n, other=0.0)
        c = tl.dot(a, b, c)
    c = tl.exp2(c * alpha)
    tl.store(c_ptr + offs_m * N + offs_n, c.to(c_ptr.dtype.element_ty), mask=mask_m & mask_n)


@triton.jit
def normalise(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """y = softmax(x), the whole row in registers, which a long one does not fit."""
    offs = tl.arange(0, BLOCK)
    x = tl.exp(tl.load(x_ptr + offs))
    tl.store(y_ptr + offs, x / tl.sum(x, 0))


@triton.jit
def double(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """y = x^2 + x, computed in double precision."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs).to(tl.float64)
    tl.store(y_ptr + offs, (x * x + x).to(tl.float32))


@triton.jit
def strided(x_ptr, stride, y_ptr, BLOCK: tl.constexpr):
    """y[i] = x[i stride]: no two elements that one thread loads are known to be neighbours."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs * stride))


@triton.jit
def running_sum(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """y = cumsum(x)."""
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.cumsum(tl.load(x_ptr + offs), 0))


def matmul_launch(
    dtype: str = "bfloat16", *, size: int = 512, alpha: float = 0.5, num_stages: int = 2
) -> Launch:
    """A product of two (512, 512) matrices, or with `size` rows in the first."""
    a = jax.ShapeDtypeStruct((size, 512), jnp.dtype(dtype))
    b = jax.ShapeDtypeStruct((512, 512), jnp.dtype(dtype))
    return Launch(
        kernel=matmul,
        inputs=(a, b),
        scalars=(size, alpha),
        outputs=(a,),
        grid=(triton.cdiv(size, 64), 8),
        constexprs={"N": 512, "K": 512, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32},
        num_stages=num_stages,
    )


def vector_launch(name: str, *scalars: int, block: int = 1024, num_warps: int = 4) -> Launch:
    """A launch of the kernel of that name with one program, on float32 vectors."""
    x = jax.ShapeDtypeStruct((block,), jnp.float32)
    return Launch(
        kernel=globals()[name],
        inputs=(x,),
        scalars=scalars,
        outputs=(x,),
        grid=(1,),
        constexprs={"BLOCK": block},
        num_warps=num_warps,
    )

"""Kernels whose text is generated: interpreted, compiled, and lowered through jax-triton."""

import linecache
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tjk import elementwise, executors
from tjk.executors import compiler, generated
from tjk.launch import Launch

M, N = 32, 16
INPUTS = {"score": "float32", "h": "int32", "q_idx": "int32", "kv_idx": "int32"}
SHIFT = """\
import triton
import triton.language as tl


@triton.jit
def shifted(x):
    return x + {amount}


@triton.jit
def shift(x_ptr, y_ptr):
    offs = tl.arange(0, 16)
    tl.store(y_ptr + offs, shifted(tl.load(x_ptr + offs)))
"""


def shift_launch(amount: float, x=None) -> Launch:
    """A kernel that always has one name; what differs stands in a function that it calls."""
    x = jax.ShapeDtypeStruct((16,), jnp.float32) if x is None else x
    return Launch(
        kernel=generated.kernel(SHIFT.format(amount=amount), "shift"),
        inputs=(x,),
        outputs=(jax.ShapeDtypeStruct((16,), jnp.float32),),
        grid=(1,),
        arch=86,
    )


def capped_and_biased(score, h, q_idx, kv_idx):
    """Many of the functions that Triton lacks, a table, and a hash."""
    table = jnp.ones((4, 64), jnp.float32)
    bits = (q_idx * 64 + kv_idx).astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    capped = 30 * jnp.tanh(score / 30) + jax.nn.softplus(score) + jax.lax.erf(score)
    powers = (abs(score) + 1) ** 1.5 + jnp.expm1(score / 50) + jnp.round(score) % 3.0
    biased = capped + powers + table[h, (q_idx - kv_idx) // 3 + 32]
    return jnp.where(bits >> jnp.uint32(31) == 0, biased, jax.nn.silu(score))


def program_launch() -> Launch:
    """A tile of a function and of all of its gradients."""
    with jax.numpy_dtype_promotion("standard"):
        program, arrays = elementwise.trace("test", "f", capped_and_biased, INPUTS, "float32")
    derivative = elementwise.derivative(program, "score").program
    pointers = ", ".join(f"a{i}_ptr" for i in range(len(arrays)))
    results = [f"y{i}" for i in range(len(derivative.outputs))]
    sums = "".join(f"    total += {y}.to(tl.float32)\n" for y in results)
    text = f"""{elementwise.HEADER}

{elementwise.source(program, "function")}

{elementwise.source(derivative, "gradients")}

@triton.jit
def harness(score_ptr, {pointers}, h, out_ptr):
    m = tl.arange(0, {M})[:, None]
    n = tl.arange(0, {N})[None, :]
    score = tl.load(score_ptr + m * {N} + n)
    total = function(score, h, m, n, {pointers})
    {", ".join(results)} = gradients(score, h, m, n, total, {pointers})
{sums}    tl.store(out_ptr + m * {N} + n, total)
"""
    tile = jax.ShapeDtypeStruct((M, N), jnp.float32)
    return Launch(
        kernel=generated.kernel(text, "harness"),
        inputs=(tile, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)),
        scalars=(3,),
        outputs=(tile,),
        grid=(1,),
    )


def _compiled(arch) -> tuple[int, int]:
    binary = compiler.compile(program_launch(), arch)
    return binary.float64, binary.spill_bytes


@pytest.mark.parametrize("arch", [80, 90, 120, "gfx942"])
def test_programs_compile(native, arch):
    assert native.submit(_compiled, arch).result() == (0, 0)


def test_equal_texts_are_one_kernel():
    first, second = (generated.kernel(SHIFT.format(amount=1.5), "shift") for _ in range(2))
    assert first is second
    assert first is not generated.kernel(SHIFT.format(amount=2.5), "shift")


def test_interpreted():
    x = jnp.arange(16, dtype=jnp.float32)
    for amount in (0.5, 4.0):
        np.testing.assert_array_equal(executors.run(shift_launch(amount, x))[0], x + amount)


def test_source_lines_outlive_a_check_of_the_cache():
    """Python drops lines of files that are gone, and Triton asks for lines when it compiles."""
    kernel, _ = (generated.kernel(SHIFT.format(amount=x), "shift") for x in (8.5, 9.5))
    linecache.checkcache()
    assert any("x + 8.5" in line for line in linecache.getlines(kernel.fn.__code__.co_filename))


def test_an_error_shows_the_line():
    text = "def broken():\n    return 1 / 0  # here\n"
    with pytest.raises(ZeroDivisionError) as error:
        generated.kernel(text, "broken")()
    assert str(error.traceback[-1].statement).strip() == "return 1 / 0  # here"


def _assemblies() -> list[str]:
    return [compiler.compile(shift_launch(amount), 86).assembly for amount in (0.5, 4.0)]


def test_compiled_kernels_of_equal_names_are_told_apart(native):
    halves, fours = native.submit(_assemblies).result()
    assert "0f3F000000" in halves  # 0.5
    assert "0f40800000" in fours  # 4.0
    assert "0f40800000" not in halves


def _cache_keys() -> list[str]:
    return [shift_launch(amount).kernel.cache_key for amount in (0.5, 4.0)]


def test_texts_are_part_of_tritons_cache_key(native):
    first, second = native.submit(_cache_keys).result()
    assert first != second


def _lowered_as_compiled() -> list[bool]:
    """Whether what jax-triton lowers holds the PTX of the right text, both in one program."""

    def twice(x):
        (x,) = executors.run(shift_launch(0.5, x))
        return executors.run(shift_launch(4.0, x))[0]

    x = jax.ShapeDtypeStruct((16,), jnp.float32)
    with mock.patch("zlib.compress", wraps=zlib.compress) as compress:
        jax.jit(twice).trace(x).lower(lowering_platforms=("cuda",))
    calls = [call.args[0] for call in compress.call_args_list]
    return [ptx.encode() in call for ptx, call in zip(_assemblies(), calls, strict=True)]


def test_jax_triton_lowers_both(native):
    assert native.submit(_lowered_as_compiled).result() == [True, True]

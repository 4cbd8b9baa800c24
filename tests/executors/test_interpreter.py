"""The interpreter executor: what it must catch, and where it must compute as a GPU does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import ON_GPU
from tests.executors import wrong_kernels as kernels
from tjk import executors
from tjk.launch import Launch, recording

pytestmark = pytest.mark.skipif(ON_GPU, reason="kernels run natively here")


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def copy_launch(x, *, n=None, shift=0, grid=None, dtype=None):
    return Launch(
        kernel=kernels.copy,
        inputs=(x,),
        scalars=(x.size if n is None else n,),
        outputs=(struct(x.size, dtype=dtype or x.dtype),),
        grid=(-(-x.size // 32) if grid is None else grid,),
        constexprs={"SHIFT": shift, "BLOCK": 32},
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
def test_copy(dtype):
    x = jnp.arange(70).astype(dtype)
    (y,) = executors.run(copy_launch(x))
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("shift", [1, -1, 10_000_000])
def test_read_out_of_bounds(shift):
    with pytest.raises(jax.errors.JaxRuntimeError, match="load outside of the buffers"):
        executors.run(copy_launch(jnp.ones(64), shift=shift))


def test_write_out_of_bounds():
    launch = Launch(
        kernel=kernels.fill,
        inputs=(),
        scalars=(33,),
        outputs=(struct(32),),
        grid=(2,),
        constexprs={"VALUE": 1.0, "BLOCK": 32},
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="store outside of the buffers: 1 of 1"):
        executors.run(launch)
    (y,) = executors.run(dataclasses.replace(launch, scalars=(32,)))
    np.testing.assert_array_equal(y, np.ones(32))


def test_atomic_out_of_bounds():
    launch = Launch(
        kernel=kernels.add,
        inputs=(jnp.ones(64),),
        outputs=(struct(63),),
        grid=(1,),
        zeroed=(0,),
        constexprs={"BLOCK": 64},
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="outside of the buffers"):
        executors.run(launch)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_unwritten_output(dtype):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"no program wrote element \(64,\)"):
        executors.run(copy_launch(jnp.ones(70, dtype), grid=2))


def test_masked_load_without_other_is_nan():
    launch = Launch(
        kernel=kernels.masked_tail,
        inputs=(jnp.ones(64),),
        scalars=(60,),
        outputs=(struct(64),),
        grid=(1,),
        constexprs={"BLOCK": 64},
    )
    (y,) = executors.run(launch)
    np.testing.assert_array_equal(np.isnan(y), np.arange(64) >= 60)


def test_zeroed_output():
    launch = Launch(
        kernel=kernels.add,
        inputs=(jnp.arange(64.0),),
        outputs=(struct(64),),
        grid=(3,),
        zeroed=(0,),
        constexprs={"BLOCK": 64},
    )
    (y,) = executors.run(launch)
    np.testing.assert_array_equal(y, 3 * np.arange(64.0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no program wrote"):
        executors.run(dataclasses.replace(launch, zeroed=()))


def product_of(a, b, precision="ieee"):
    launch = Launch(
        kernel=kernels.product,
        inputs=(a, b),
        outputs=(struct(*a.shape),),
        grid=(1,),
        constexprs={"SIZE": a.shape[0], "PRECISION": precision},
    )
    return executors.run(launch)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_product(dtype):
    a, b = jax.random.normal(jax.random.key(0), (2, 32, 32)).astype(dtype)
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(product_of(a, b), expected, rtol=1e-5, atol=1e-5)


def test_tf32_product_truncates_its_operands():
    """To 10 bits of mantissa: Triton hands float32 to the tensor cores as it is."""
    ulp = 2.0**-10
    a = jnp.eye(16) * (1 + jnp.array([0.49, 0.5, -0.5, 1.4, 3, 0, 0, 0] * 2) * ulp)
    expected = np.eye(16) * (1 + np.array([0, 0, -0.5, 1, 3, 0, 0, 0] * 2) * ulp)
    np.testing.assert_array_equal(product_of(a, jnp.eye(16), "tf32"), expected)
    np.testing.assert_array_equal(product_of(jnp.eye(16), a, "tf32"), expected)
    np.testing.assert_array_equal(product_of(a, jnp.eye(16), "ieee"), a)


def test_bfloat16_rounds_to_nearest():
    special = jnp.array([jnp.nan, jnp.inf, -0.0, 1e-40])
    x = jax.random.normal(jax.random.key(0), (64,)).at[:4].set(special)
    launch = Launch(
        kernel=kernels.convert,
        inputs=(x,),
        outputs=(struct(64, dtype=jnp.bfloat16),),
        grid=(1,),
        constexprs={"BLOCK": 64},
    )
    actual, expected = executors.run(launch)[0], x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.float32(actual), np.float32(expected))


def test_scalars():
    launch = Launch(
        kernel=kernels.scaled,
        inputs=(jnp.arange(16.0),),
        scalars=(0.1, 2**31),
        outputs=(struct(16),),
        grid=(1,),
        constexprs={"BLOCK": 16},
    )
    expected = np.arange(16, dtype=np.float32) * np.float32(0.1) + np.float32(2**31)
    np.testing.assert_array_equal(executors.run(launch)[0], expected)


def sums_launch(x, *, batched=True):
    return Launch(
        kernel=kernels.row_sums,
        inputs=(x,),
        scalars=(x.shape[1],),
        outputs=(struct(x.shape[0]),),
        grid=(x.shape[0],),
        constexprs={"BLOCK": 16},
        batched=batched,
        bytes=x.size * 4,
    )


@pytest.mark.parametrize(("batched", "grid"), [(True, 30), (False, 3)])
def test_vmap(batched, grid):
    """Folds into the batch where it can, and loops where not, nested either way."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 9, 5))

    def sums(x):
        return executors.run(sums_launch(x, batched=batched))[0]

    mapped = jax.vmap(jax.vmap(sums, in_axes=2, out_axes=1))
    with recording() as launches:
        y = mapped(x.transpose(0, 1, 3, 2)[:, :, :5, :5])
    expected = np.asarray(x.transpose(0, 1, 3, 2)[:, :, :5, :5]).sum(2)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert {launch.grid for launch in launches} == {(grid,)}


def test_grid_of_zero_launches_nothing():
    (y,) = executors.run(dataclasses.replace(copy_launch(jnp.ones(64)), grid=(0,)))
    np.testing.assert_array_equal(y, np.zeros(64))


@pytest.mark.parametrize("grid", [(2**31,), (1, 2**16), (1, 1, 1, 1)])
def test_impossible_grid(grid):
    with pytest.raises(ValueError, match="copy: grid must have at most three axes"):
        executors.run(dataclasses.replace(copy_launch(jnp.ones(64)), grid=grid))


def test_recording_sees_what_was_traced_before():
    """JAX's trace cache does not hide a launch."""
    function = jax.jit(lambda x: executors.run(copy_launch(x))[0])
    x = jnp.ones(64)
    function(x)
    with recording() as launches:
        jax.eval_shape(function, x)
    assert [launch.name for launch in launches] == ["copy"]
    assert launches[0].inputs == (struct(64),)
    with recording() as launches:
        jax.eval_shape(function, x)
    assert len(launches) == 1


@pytest.mark.parametrize("arch", [75, "sm_86", 8.6, "86"])
def test_unknown_target(arch):
    match = "target: arch must be a compute capability"
    with pytest.raises(ValueError, match=match), executors.target(arch):
        pass


def test_target_is_part_of_the_trace():
    seen = []
    function = jax.jit(lambda x: [seen.append(executors.architecture()), x][1])
    for arch in (86, 90, 86):
        with executors.target(arch):
            function(jnp.ones(1))
    assert seen == [86, 90]

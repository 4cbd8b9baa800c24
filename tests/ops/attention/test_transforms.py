"""flash_attention under JAX's transformations."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tests.ops.attention.oracle import Shape, inputs
from tjk import executors
from tjk.launch import recording
from tjk.ops import flash_attention

SMALL = Shape(B=2, T=9, S=11, N=2, K=1, H=8, V=8)


def operands(*lead, shape=SMALL, dtype="float32"):
    """query, key and value with further axes in front."""
    rng = np.random.default_rng(1)
    sizes = [x.shape for x in inputs(shape)[:3]]
    return [jnp.asarray(rng.standard_normal((*lead, *size)), dtype) for size in sizes]


def attend(implementation, **options):
    options = {"precision": "highest", "is_causal": True} | options
    return functools.partial(flash_attention, implementation=implementation, **options)


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def stacked(function, axes, *arrays):
    """What vmap must give: one call for each index, stacked."""
    size = next(x.shape[axis] for x, axis in zip(arrays, axes) if axis is not None)
    calls = [
        function(*(x if axis is None else jnp.take(x, i, axis) for x, axis in zip(arrays, axes)))
        for i in range(size)
    ]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *calls)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, 0, None), (0, None, 1)], ids=str
)
def test_vmap(implementation, axes):
    arrays = [
        x if axis == 0 else x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(operands(3), axes)
    ]
    function = attend(implementation)
    assert_close(jax.vmap(function, axes)(*arrays), stacked(function, axes, *arrays))


def test_vmap_over_lengths_alone(implementation):
    query, key, value = operands()
    lengths = jnp.array([[3, 0], [11, 7], [1, 1]], jnp.int32)

    def function(lengths):
        call = attend(implementation, key_value_seq_lengths=lengths, return_residual=True)
        return call(query, key, value)

    assert_close(jax.vmap(function)(lengths), stacked(function, (0,), lengths))


def test_nested_vmap(implementation):
    query, key, value = operands(2, 3)
    function = attend(implementation)
    nested = jax.vmap(jax.vmap(function, (0, None, 0)), (0, 0, 0))
    expected = stacked(
        lambda q, k, v: stacked(function, (0, None, 0), q, k, v),
        (0, 0, 0),
        query,
        key[:, 0],
        value,
    )
    assert_close(nested(query, key[:, 0], value), expected)


@pytest.mark.parametrize("deterministic", [False, True])
def test_vmap_of_grad_and_grad_of_vmap(implementation, deterministic):
    arrays = operands(3)
    function = attend(implementation, deterministic=deterministic)

    def loss(*arrays):
        return jnp.sum(function(*arrays) ** 2)

    gradient = jax.grad(loss, (0, 1, 2))
    expected = stacked(gradient, (0, 0, 0), *arrays)
    assert_close(jax.vmap(gradient)(*arrays), expected)
    assert_close(jax.grad(lambda *x: jnp.sum(jax.vmap(loss)(*x)), (0, 1, 2))(*arrays), expected)


def test_vmap_folds_into_the_batch():
    query, key, value = operands(3)
    with recording() as launches:
        jax.eval_shape(jax.vmap(attend("triton")), query, key, value)
    assert [launch.inputs[0].shape for launch in launches] == [(6, *SMALL_QUERY)]


SMALL_QUERY = (SMALL.T, SMALL.N, SMALL.H)


def test_jit_and_scan(implementation):
    query, key, value = operands(2)
    function = attend(implementation)
    expected = stacked(function, (0, 0, 0), query, key, value)
    assert_close(jax.jit(jax.vmap(function))(query, key, value), expected)
    _, scanned = jax.lax.scan(lambda _, x: (None, function(*x)), None, (query, key, value))
    assert_close(scanned, expected)


@pytest.mark.parametrize("policy", [None, "names"])
def test_remat(implementation, policy):
    arrays = operands()
    names = jax.checkpoint_policies.save_only_these_names(
        "flash_attention_output", "flash_attention_logsumexp"
    )

    def loss(*arrays):
        return jnp.sum(attend(implementation)(*arrays) ** 2)

    remat = jax.checkpoint(loss, policy=names if policy else None)
    gradient = functools.partial(jax.grad, argnums=(0, 1, 2))
    assert_close(jax.jit(gradient(remat))(*arrays), gradient(loss)(*arrays))


@pytest.mark.parametrize("sharded", [(True, True, True), (True, False, False), (False, True, True)])
def test_shard_map(implementation, sharded):
    """With JAX's check of how values vary, and operands that vary differently."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = tuple(jax.P("x") if is_sharded else jax.P() for is_sharded in sharded)
    arrays = operands()

    def value_and_gradients(attend, *arrays):
        output, vjp = jax.vjp(attend, *arrays)
        return output, vjp(output)

    function = attend(implementation)
    local = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=jax.P("x"))
    actual = jax.jit(functools.partial(value_and_gradients, local))(*arrays)
    assert_close(actual, value_and_gradients(function, *arrays))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_double_precision_mode_changes_nothing(implementation, dtype):
    arrays = operands(dtype=dtype)
    function = attend(implementation, return_residual=True)
    expected = function(*arrays)
    with jax.enable_x64(True):
        actual = function(*arrays)
        gradient = jax.grad(lambda q: jnp.sum(function(q, *arrays[1:])[0]))(arrays[0])
    assert [x.dtype for x in actual] == [jnp.dtype(dtype), jnp.float32]
    assert gradient.dtype == dtype
    for a, b in zip(actual, expected):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_rank_three(implementation):
    query, key, value = (x[0] for x in operands())
    function = attend(implementation, return_residual=True)
    output, logsumexp = function(query, key, value)
    batched = function(query[None], key[None], value[None])
    assert_close((output, logsumexp), [x[0] for x in batched])
    assert logsumexp.shape == query.shape[:2]


def test_agrees_with_jax(implementation):
    """Same arguments, same result, where no row is fully masked."""
    query, key, value = operands(shape=Shape(B=2, T=12, S=20, N=4, K=2, H=8, V=8))
    options = {
        "is_causal": True,
        "scale": 0.3,
        "local_window_size": (5, 2),
        "key_value_seq_lengths": jnp.array([20, 13], jnp.int32),
        "query_seq_lengths": jnp.array([12, 9], jnp.int32),
    }
    ours = attend(implementation, **options)(query, key, value)
    with jax.numpy_dtype_promotion("standard"):
        theirs = jax.nn.dot_product_attention(query, key, value, **options)
    assert_close(ours, theirs)


@pytest.mark.parametrize("deterministic", [True, False])
def test_two_runs_give_the_same_bits(implementation, deterministic):
    """On a GPU only where it is promised; the interpreter adds in one order."""
    if not deterministic and implementation == "triton" and jax.default_backend() == "gpu":
        pytest.skip("atomics add in any order")
    arrays = operands()
    function = attend(implementation, deterministic=deterministic)
    gradient = jax.grad(lambda *x: jnp.sum(function(*x) ** 2), (0, 1, 2))
    for a, b in zip(gradient(*arrays), gradient(*arrays)):
        np.testing.assert_array_equal(a, b)


# The rest lowers for CUDA, in a process where Triton compiles.

STRUCT = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)


def _loss(query, key, value):
    return jnp.sum(flash_attention(query, key, value).astype(jnp.float32))


def _launches_in(text: str) -> int:
    return len(re.findall(r"custom_call @triton_kernel_call", text))


def _lowered_launches(policy: str) -> int:
    names = jax.checkpoint_policies.save_only_these_names(
        "flash_attention_output", "flash_attention_logsumexp"
    )
    loss = {
        "no remat": _loss,
        "nothing": jax.checkpoint(_loss),
        "names": jax.checkpoint(_loss, policy=names),
    }[policy]
    with executors.target(86):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(STRUCT, STRUCT, STRUCT)
    return _launches_in(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize(("policy", "count"), [("no remat", 2), ("names", 2), ("nothing", 3)])
def test_remat_by_name_runs_the_forward_kernel_once(native, policy, count):
    assert native.submit(_lowered_launches, policy).result() == count


def _export() -> tuple[int, list[bool], str]:
    """Launches in an export for both platforms, whether it is right on the CPU, and the error
    where Triton was asked for by name."""
    custom_calls = ("triton_kernel_call", "triton_kernel_call_ffi", "tjk_triton_needs_a_gpu")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in custom_calls]
    platforms = ("cpu", "cuda")
    gradient = jax.jit(jax.grad(_loss, (0, 1, 2)))
    x = jax.random.normal(jax.random.key(0), STRUCT.shape, STRUCT.dtype)
    with executors.target(86):
        both = export.export(gradient, platforms=platforms, disabled_checks=checks)
        exported = both(STRUCT, STRUCT, STRUCT)
        by_name = jax.jit(lambda x: flash_attention(x, x, x, implementation="triton"))
        triton = export.export(by_name, platforms=platforms, disabled_checks=checks)(STRUCT)
    equal = [bool((a == b).all()) for a, b in zip(exported.call(x, x, x), gradient(x, x, x))]
    try:
        triton.call(x)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
    return _launches_in(exported.mlir_module()), equal, message


def test_export_for_cpu_and_cuda_from_one_function(native):
    launches, equal, message = native.submit(_export).result()
    assert launches == 2
    assert equal == [True, True, True]
    assert "tjk_triton_needs_a_gpu" in message


def _kernels_for_lengths() -> int:
    """How many different kernels lengths 1000 to 1064 compile."""
    from unittest import mock

    import triton.compiler.code_generator as code_generator

    with (
        executors.target(86),
        mock.patch.object(
            code_generator, "ast_to_ttir", wraps=code_generator.ast_to_ttir
        ) as compiled,
    ):
        for length in (1000, 1001, 1008, 1023, 1024, 1037, 1056, 1064):
            # Heads that no other test of this process has compiled.
            struct = jax.ShapeDtypeStruct((2, length, 5, 64), jnp.bfloat16)
            traced = jax.jit(flash_attention).trace(struct, struct, struct)
            traced.lower(lowering_platforms=("cuda",))
    return compiled.call_count


def test_lengths_share_kernels(native):
    assert 1 <= native.submit(_kernels_for_lengths).result() <= 3


def _error_without_target() -> str:
    try:
        jax.jit(flash_attention).trace(STRUCT, STRUCT, STRUCT).lower(lowering_platforms=("cuda",))
    except ValueError as error:
        return str(error)
    return ""


def test_lowering_for_an_unnamed_gpu_is_an_error(native):
    message = native.submit(_error_without_target).result()
    assert "with tjk.executors.target(86)" in message


def _error_on_a_cpu() -> str:
    try:
        jax.jit(functools.partial(flash_attention, implementation="triton")).lower(
            STRUCT, STRUCT, STRUCT
        )
    except ValueError as error:
        return str(error)
    return ""


def test_triton_on_a_cpu_without_the_interpreter_is_an_error(native):
    message = native.submit(_error_on_a_cpu).result()
    assert "TRITON_INTERPRET=1 must be set before Triton is imported" in message


def _launches_for_rocm(arch: str) -> int:
    with executors.target(arch):
        traced = jax.jit(jax.grad(_loss, (0, 1, 2))).trace(STRUCT, STRUCT, STRUCT)
    return _launches_in(traced.lower(lowering_platforms=("rocm",)).as_text())


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_lowers_for_amd_without_a_card(native, arch):
    assert native.submit(_launches_for_rocm, arch).result() == 2

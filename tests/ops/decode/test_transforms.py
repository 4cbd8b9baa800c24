"""decode_attention under JAX's transformations, in a loop that generates, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.attention.oracle import Shape, inputs
from tests.ops.decode.oracle import lengths
from tjk import executors
from tjk.launch import recording
from tjk.ops import flash_attention
from tjk.ops.decode import decode_attention

SMALL = Shape(B=2, T=2, S=40, N=4, K=2, H=8, V=8)
USED = lengths(40, 17)


def operands(*lead, dtype="float32"):
    """query, key and value with further axes in front."""
    rng = np.random.default_rng(1)
    sizes = [x.shape for x in inputs(SMALL)[:3]]
    return [jnp.asarray(rng.standard_normal((*lead, *size)), dtype) for size in sizes]


def decode(implementation, **options):
    """A function of query, key, value and lengths."""
    options = {"precision": "highest", "splits": 2, "implementation": implementation} | options
    return lambda q, k, v, used=USED: decode_attention(q, k, v, lengths=used, **options)


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0, 0), (0, None, None, None), (None, None, None, 0), (1, 0, 2, None)], ids=str
)
def test_vmap(implementation, axes):
    arrays = [*operands(3), jnp.stack([USED, USED // 2, 0 * USED])]
    mapped = [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(arrays, axes)]
    function = decode(implementation, return_residual=True)
    actual = jax.jit(jax.vmap(function, axes))(*mapped)
    for i in range(3):
        one = (x[0] if axis is None else x[i] for x, axis in zip(arrays, axes))
        assert_close([x[i] for x in actual], function(*one))


def test_vmap_folds_into_the_batch():
    used = jnp.stack([USED] * 3)
    with recording() as launches:
        jax.eval_shape(jax.vmap(decode("triton", splits=1)), *operands(3), used)
    (launch,) = launches
    assert launch.inputs[1].shape == (6, SMALL.S, SMALL.K, SMALL.H)
    assert launch.outputs[0].shape == (6, 1, SMALL.T, SMALL.N, SMALL.V)


def test_one_token_needs_no_axis(implementation):
    query, key, value = operands()
    function = decode(implementation, return_residual=True)
    output, logsumexp = function(query[:, 0], key, value)
    assert output.shape == (SMALL.B, SMALL.N, SMALL.V)
    assert_close((output, logsumexp), [x[:, 0] for x in function(query[:, :1], key, value)])


def test_two_runs_give_the_same_bits(implementation):
    function = decode(implementation, return_residual=True)
    for a, b in zip(function(*operands()), jax.jit(function)(*operands())):
        np.testing.assert_array_equal(a, b)


def test_generation(implementation):
    """A loop that appends to its cache gives the rows of flash_attention."""
    B, L, N, K, H = 2, 12, 4, 2, 16
    query, key, value = (jnp.float32(x) for x in inputs(Shape(B, L, L, N, K, H, H))[:3])

    def step(cache, token):
        *tensors, used = cache
        new_query, *new = token
        tensors = [
            jax.lax.dynamic_update_slice_in_dim(x, y[:, None], used[0], 1)
            for x, y in zip(tensors, new)
        ]
        output = decode(implementation, local_window_size=5)(new_query, *tensors, used + 1)
        return (*tensors, used + 1), output

    empty = jnp.full((B, L + 3, K, H), jnp.nan)
    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value)]
    _, outputs = jax.jit(lambda *x: jax.lax.scan(step, *x))((empty, empty, lengths(0, 0)), tokens)
    expected = flash_attention(
        *(query, key, value),
        is_causal=True,
        local_window_size=(5, 0),
        precision="highest",
        implementation="xla",
    )
    assert_close(jnp.moveaxis(outputs, 0, 1), expected)


@pytest.mark.parametrize("sharded", [(0, 1, 2, 3), (0,), (1, 2)], ids=str)
def test_shard_map(implementation, sharded):
    """With JAX's check of how values vary, and operands that vary differently."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = tuple(jax.P("x") if i in sharded else jax.P() for i in range(4))
    function = decode(implementation, local_window_size=20)
    local = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=jax.P("x"))
    assert_close(jax.jit(local)(*operands(), USED), function(*operands()))


def test_double_precision_mode_changes_nothing(implementation):
    function = decode(implementation, return_residual=True, local_window_size=20)
    expected = function(*operands(dtype="bfloat16"))
    with jax.enable_x64(True):
        actual = function(*operands(dtype="bfloat16"))
    assert [x.dtype for x in actual] == [jnp.bfloat16, jnp.float32]
    for a, b in zip(actual, expected):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_no_derivative(implementation):
    query, key, value = operands()
    function = decode(implementation)

    def loss(query, key, stop):
        query = jax.lax.stop_gradient(query) if stop else query
        return jnp.sum(function(query, key, value)) + jnp.sum(query * 3)

    message = "decode_attention: has no derivative; use flash_attention for training"
    for transform in (jax.grad(loss), jax.jit(jax.grad(loss, 1), static_argnums=2)):
        with pytest.raises(NotImplementedError, match=message):
            transform(query, key, False)
    np.testing.assert_array_equal(jax.grad(loss)(query, key, True), 0 * query)


ERRORS = {
    "query must have shape (B, T, N, H) or (B, N, H), got (8, 16)": {"query": (8, 16)},
    "key must have shape (B, S, K, H) with B=2, H=16, got (2, 6, 2, 32)": {"key": (2, 6, 2, 32)},
    "value must have shape (B, S, K, V) with B=2, S=6, K=2, got (2, 7, 2, 24)": {
        "value": (2, 7, 2, 24)
    },
    "query's heads N must be a positive multiple of key's heads K": {"query": (2, 3, 16)},
    "lengths must have shape (B,) with B=2, got (3,)": {"lengths": (3,)},
    "local_window_size must be at least 0, got -1": {"local_window_size": -1},
    "logits_soft_cap must be positive, got 0.0": {"logits_soft_cap": 0.0},
    "logits_soft_cap must be positive, got nan": {"logits_soft_cap": float("nan")},
    "splits must be at least 1, got 0": {"splits": 0},
    "implementation must be None, 'triton' or 'xla', got 'cudnn'": {"implementation": "cudnn"},
    "precision must be None, 'default', 'high', 'highest'": {"precision": "double"},
}


def call(dtypes=None, **changes):
    """decode_attention of structs, with some shapes, dtypes or options replaced."""
    shapes = {"query": (2, 4, 16), "key": (2, 6, 2, 16), "value": (2, 6, 2, 24), "lengths": (2,)}
    dtypes = dict.fromkeys(shapes, "float32") | {"lengths": "int32"} | (dtypes or {})
    structs = {
        name: jax.ShapeDtypeStruct(changes.pop(name, shape), dtypes[name])
        for name, shape in shapes.items()
    }
    return jax.eval_shape(functools.partial(decode_attention, **changes), **structs)


@pytest.mark.parametrize(("message", "changes"), ERRORS.items(), ids=str)
def test_value_errors(message, changes):
    with pytest.raises(ValueError, match=re.escape("decode_attention: " + message)):
        call(**changes)


@pytest.mark.parametrize(
    ("message", "dtypes"),
    {
        "query must have dtype float32 or bfloat16 or float16": {"query": "int32"},
        "key must have the dtype of query (float32), got bfloat16": {"key": "bfloat16"},
        "value must have the dtype of query (float32), got float16": {"value": "float16"},
        "lengths must have dtype int32, got float32": {"lengths": "float32"},
    }.items(),
    ids=str,
)
def test_dtype_errors(implementation, message, dtypes):
    with pytest.raises(TypeError, match=re.escape("decode_attention: " + message)):
        call(dtypes, implementation=implementation)


def test_triton_by_name_never_falls_back():
    wide = {"value": (2, 6, 2, 257)}
    message = r"implementation='triton' does not take a width above 256 \(257\)"
    with pytest.raises(NotImplementedError, match=message):
        call(**wide, implementation="triton")
    assert call(**wide).shape == (2, 4, 257)


# The rest lowers for CUDA, in a process where Triton compiles.


def _lowered_launches(splits) -> int:
    query = jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((2, 4096, 2, 64), jnp.bfloat16)
    used = jax.ShapeDtypeStruct((2,), jnp.int32)
    with executors.target(90):
        function = jax.jit(lambda q, k, n: decode_attention(q, k, k, lengths=n, splits=splits))
        traced = function.trace(query, cache, used)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"custom_call @triton_kernel_call", text))


@pytest.mark.parametrize(("splits", "launches"), [(1, 1), (None, 2)])
def test_default_on_a_gpu_is_triton(native, splits, launches):
    assert native.submit(_lowered_launches, splits).result() == launches

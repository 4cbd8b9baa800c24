"""What only the plain-JAX implementation has: float64, and tiles cut by shape.

In float64 against the reference's own derivative, most of it with tiles so small that there are
several, and a last one that overlaps.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from tests.ops.attention.oracle import Shape, inputs
from tjk.ops import flash_attention
from tjk.ops.attention import reference, rule, xla
from tjk.ops.attention.operands import Operands, Options

NAMES = ("output", "logsumexp", "d_query", "d_key", "d_value", "d_bias")
SHAPE = Shape(B=2, T=46, S=52, N=4, K=2, H=5, V=3)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of at most 16 x 10."""
    monkeypatch.setattr(xla, "_blocks", lambda heads, T, S: (xla._cut(T, 16), xla._cut(S, 10)))


def lengths(*values):
    return np.array(values, np.int32)


def draw_bias(*shape):
    return np.random.default_rng(2).standard_normal(shape)


def draw_mask(*shape):
    return np.random.default_rng(3).random(shape) > 0.4


def by_xla(operands, rest, cotangents, *, scale=0.7, window=(None, None)):
    """Output, logsumexp and gradients; operands are query, key, value, bias, rest what follows."""
    options = Options("xla", scale, window)
    results, vjp = jax.vjp(lambda *x: rule._attention(Operands(*x, *rest), options), *operands)
    return *results, *vjp(tuple(cotangents))


def by_reference(operands, rest, cotangents, *, scale=0.7, window=(None, None)):
    results, vjp = jax.vjp(
        lambda *x: reference.attention(*x, *rest, scale=scale, window=window), *operands
    )
    return *results, *vjp(tuple(cotangents))


def check(
    shape,
    *,
    bias=None,
    mask=None,
    query_lengths=None,
    key_lengths=None,
    **options,
):
    """Fails unless all results in float64 are the reference's, up to float64's roundings."""
    *operands, d_output, d_logsumexp = inputs(shape)
    arguments = (
        (*operands, bias),
        (mask, query_lengths, key_lengths),
        (d_output, d_logsumexp.swapaxes(1, 2)),
    )
    with jax.enable_x64(True):
        arguments = jax.tree.map(jnp.asarray, arguments)
        actual = jax.jit(functools.partial(by_xla, **options))(*arguments)
        expected = jax.jit(functools.partial(by_reference, **options))(*arguments)
        for name, a, e in zip(NAMES, actual, expected):
            assert (a is None) == (e is None), name
            if a is not None:
                assert a.dtype == e.dtype, name
                np.testing.assert_allclose(a, e, rtol=1e-11, atol=1e-11, err_msg=name)


SHAPES = [
    Shape(B=1, T=1, S=1, N=1, K=1, H=1, V=1),
    Shape(B=2, T=7, S=65, N=4, K=2, H=5, V=3),
    Shape(B=2, T=65, S=7, N=4, K=1, H=3, V=6),
    Shape(B=1, T=130, S=30, N=3, K=3, H=4, V=4),
    Shape(B=1, T=16, S=10, N=1, K=1, H=2, V=2),
    Shape(B=2, T=5, S=0, N=2, K=1, H=2, V=3),
    Shape(B=2, T=0, S=5, N=2, K=1, H=2, V=3),
    Shape(B=0, T=5, S=5, N=2, K=1, H=2, V=3),
]


@pytest.mark.parametrize("window", [(None, 0), (4, 2)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_shapes(shape, window):
    check(shape, window=window)


FLAGS = {
    "nothing": {},
    "window on the left": {"window": (20, -5)},
    "window on the right": {"window": (-9, 30)},
    "window of nothing": {"window": (-52, None)},
    "window of everything": {"window": (2**30, 2**30)},
    "lengths": {"query_lengths": lengths(46, 3), "key_lengths": lengths(0, 33)},
    "window and lengths": {
        "window": (12, 0),
        "query_lengths": lengths(0, 40),
        "key_lengths": lengths(52, 29),
    },
    "scale": {"scale": -1.3, "window": (None, 3)},
    "bias that hides": {"bias": np.where(draw_mask(2, 1, 46, 52), 0.0, -np.inf)},
    "bias that hides whole rows": {"bias": np.where(draw_mask(2, 4, 46, 1), 0.0, -np.inf)},
    "all": {
        "window": (25, 4),
        "query_lengths": lengths(39, 46),
        "key_lengths": lengths(50, 21),
        "bias": draw_bias(1, 4, 46, 52),
        "mask": draw_mask(2, 1, 46, 52),
    },
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.usefixtures("small_tiles")
def test_flags(flags):
    check(SHAPE, **flags)


# Each axis broadcast and not, and each pair of axes.
BROADCAST = [
    (2, 4, 46, 52),
    (1, 1, 1, 1),
    (1, 4, 1, 52),
    (2, 1, 46, 1),
    (1, 4, 46, 1),
    (2, 1, 1, 52),
]


@pytest.mark.parametrize("shape", BROADCAST, ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_bias_and_its_gradient(shape):
    check(SHAPE, bias=draw_bias(*shape), window=(None, 20), key_lengths=lengths(52, 17))


@pytest.mark.parametrize("shape", [(1, 1, 1, 52), (2, 1, 46, 52), (1, 4, 46, 1), (2, 4, 1, 1)])
@pytest.mark.usefixtures("small_tiles")
def test_mask(shape):
    check(SHAPE, mask=draw_mask(*shape))


def test_tiles_as_shipped():
    shape = Shape(B=1, T=1100, S=700, N=2, K=1, H=2, V=2)
    check(shape, window=(600, 30), bias=draw_bias(1, 1, 1, 700))


@pytest.mark.parametrize("heads", [0, 1, 3, 8, 32, 4096])
@pytest.mark.parametrize(("T", "S"), [(1, 10**6), (77, 4096), (511, 513), (5000, 64), (0, 0)])
def test_blocks(heads, T, S):
    """They cover each length, none in vain, in tiles that do not grow with the lengths."""
    (rows, block_t), (columns, block_s) = xla._blocks(heads, T, S)
    for count, block, length in ((rows, block_t, T), (columns, block_s, S)):
        assert (count - 1) * block < length <= count * block or length == count == 0
    assert block_t * block_s <= max(2**20 // max(heads, 1), 2**14)


@pytest.mark.parametrize("window", [(None, 0), (7, None), (3, 2), (-20, 30), (30, -20), (-50, 9)])
@pytest.mark.usefixtures("small_tiles")
def test_only_visible_columns_are_visited(window):
    T, S = 46, 52
    query, key = jnp.zeros((1, T, 1, 1)), jnp.zeros((1, S, 1, 1))
    tiles = xla._Tiles.of(Operands(query, key, key), Options("xla", 1.0, window))
    left, right = (math.inf if x is None else x for x in window)
    for i in range(tiles.row_count):
        first, end = tiles._visible_columns(i)
        start = int(tiles.first_row(i))
        t = np.arange(start, start + tiles.block_t)[:, None]
        s = np.arange(S)
        seen = ((s >= t - left) & (s <= t + right)).any(axis=0).nonzero()[0] // tiles.block_s
        expected = range(seen.min(), seen.max() + 1) if seen.size else range(0)
        assert list(range(int(first), int(end))) == list(expected)


@pytest.mark.parametrize("window", [(-(2**40), 2**40), (2**40, -(2**40))], ids=str)
def test_window_beyond_int32(window):
    operands = (jnp.float32(x) for x in inputs(Shape(B=1, T=3, S=4))[:3])
    options = {"local_window_size": window, "return_residual": True, "implementation": "xla"}
    output, logsumexp = flash_attention(*operands, **options)
    assert not output.any()
    assert (logsumexp == -jnp.inf).all()


def test_gradients_of_rows_that_see_nothing():
    """They are 0 even where the loss makes infinity or NaN of a logsumexp of -inf."""
    shape = Shape(B=1, T=3, S=4)
    query, key, value, d_output, _ = (jnp.float32(x) for x in inputs(shape))
    rest = (jnp.zeros((1, 1, 3, 1), bool), None, None)
    for bad in (jnp.inf, jnp.nan):
        d_logsumexp = jnp.full((1, shape.N, 3), bad)
        results = by_xla((query, key, value, None), rest, (d_output, d_logsumexp))
        output, logsumexp, *gradients = results
        assert not output.any()
        assert (logsumexp == -jnp.inf).all()
        assert not any(x.any() for x in gradients[:3])


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype, bias_dtype, double):
    """Those of the inputs, and float32 for logsumexp, whether or not JAX has float64."""
    query, key, value, d_output, d_logsumexp = inputs(SHAPE)
    with jax.enable_x64(double):
        operands = [jnp.asarray(x, dtype) for x in (query, key, value, d_output)]
        bias = jnp.asarray(draw_bias(1, 4, 46, 52), bias_dtype)
        cotangents = operands.pop(), jnp.asarray(d_logsumexp.swapaxes(1, 2), "float32")
        rest = (None, None, lengths(52, 9))
        results = jax.eval_shape(by_xla, (*operands, bias), rest, cotangents)
    assert [x.dtype for x in results] == [dtype, "float32", dtype, dtype, dtype, bias_dtype]


def test_vmap_over_everything():
    """Bias, mask and lengths have an axis more, too; the window makes the loops dynamic."""
    count, shape = 3, Shape(B=1, T=9, S=11, N=2, K=1, H=4, V=2)
    problems = [inputs(shape, seed) for seed in range(count)]
    *operands, d_output, d_logsumexp = (jnp.float32(np.stack(x)) for x in zip(*problems))
    arguments = (
        (*operands, jnp.float32(draw_bias(count, 1, 2, 1, 11))),
        (
            jnp.asarray(draw_mask(count, 1, 1, 9, 11)),
            jnp.asarray(lengths(9, 4, 0)[:, None]),
            jnp.asarray(lengths(11, 3, 5)[:, None]),
        ),
        (d_output, jnp.swapaxes(d_logsumexp, 2, 3)),
    )
    function = functools.partial(by_xla, window=(4, 1))
    actual = jax.jit(jax.vmap(function))(*arguments)
    for i in range(count):
        expected = jax.jit(function)(*jax.tree.map(lambda x, i=i: x[i], arguments))
        for name, a, e in zip(NAMES, actual, expected):
            np.testing.assert_allclose(a[i], e, rtol=1e-5, atol=1e-5, err_msg=name)


def structs(T, dtype="float32", bias=None):
    """Arguments of `by_xla` for B=1, N=4, K=2, H=V=64 as shapes."""
    query = jax.ShapeDtypeStruct((1, T, 4, 64), dtype)
    key = jax.ShapeDtypeStruct((1, T, 2, 64), dtype)
    d_logsumexp = jax.ShapeDtypeStruct((1, 4, T), jnp.float32)
    bias = None if bias is None else jax.ShapeDtypeStruct(bias, dtype)
    return (query, key, key, bias), (None, None, None), (query, d_logsumexp)


def sizes(jaxpr):
    """Number of elements of every array in a jaxpr, those inside of loops included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield math.prod(variable.aval.shape)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


@pytest.mark.parametrize("T", [2**13, 2**17, 2**21])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (1000, 1000)], ids=str)
def test_no_array_is_larger_than_the_inputs_or_a_tile(T, window):
    function = functools.partial(by_xla, window=window)
    jaxpr = jax.make_jaxpr(function)(*structs(T))
    assert max(sizes(jaxpr.jaxpr)) == max(T * 4 * 64, 2**20)


def temporary_bytes(*arguments):
    compiled = jax.jit(functools.partial(by_xla, window=(None, 0))).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_linear(dtype):
    short, long = (temporary_bytes(*structs(T, dtype)) for T in (2**11, 2**14))
    assert long < 8 * short


def test_bias_is_not_copied():
    T = 2**12
    without, bias = temporary_bytes(*structs(T)), (1, 4, T, T)
    assert temporary_bytes(*structs(T, bias=bias)) < without + 0.1 * 4 * math.prod(bias)

"""Programs of scalar functions: what JAX computes, in JAX, in Triton, and differentiated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tjk import elementwise, executors
from tjk.elementwise.program import Literal, Program
from tjk.executors import generated
from tjk.launch import Launch

INPUTS = {"score": "float32", "b": "int32", "h": "int32", "q_idx": "int32", "kv_idx": "int32"}
M, N = 16, 32
TABLE = jnp.asarray(np.random.default_rng(0).standard_normal((3, M + N)), jnp.float32)
IDS = jnp.asarray(np.random.default_rng(1).integers(-5, 9, 40), jnp.int32)
SEEN = jnp.asarray(np.random.default_rng(2).random((M, N)) > 0.5)
HALF = TABLE.astype(jnp.bfloat16)


@functools.cache
def values():
    score = np.random.default_rng(3).standard_normal((M, N)) * 3
    score[0, :4] = (0, 1e-4, -1e-4, 40)
    b, h = jnp.int32(1), jnp.int32(2)
    q_idx, kv_idx = (jnp.asarray(x, jnp.int32) for x in np.ogrid[:M, :N])
    return jnp.float32(score), b, h, q_idx, kv_idx


def everywhere(function, score=None):
    """A function of scalars at all positions, by JAX's own vmap; of another score if given."""
    by_column = jax.vmap(function, (0, None, None, None, 0))
    by_row = jax.vmap(by_column, (0, None, None, 0, None))
    usual, b, h, q_idx, kv_idx = values()
    return by_row(usual if score is None else score, b, h, q_idx[:, 0], kv_idx[0])


def in_triton(program: Program, arrays):
    """The program in a kernel of one tile."""
    pointers = ", ".join(f"a{i}_ptr" for i in range(len(arrays)))
    text = f"""{elementwise.HEADER}

{elementwise.source(program, "function")}

@triton.jit
def harness(score_ptr, {pointers + "," if arrays else ""} b, h, out_ptr):
    m = tl.arange(0, {M})[:, None]
    n = tl.arange(0, {N})[None, :]
    y = function(tl.load(score_ptr + m * {N} + n), b, h, m, n, {pointers})
    tl.store(out_ptr + m * {N} + n, tl.zeros([{M}, {N}], tl.float32) + y)
"""
    score, b, h, *_ = values()
    launch = Launch(
        kernel=generated.kernel(text, "harness"),
        inputs=(score, *arrays),
        scalars=(int(b), int(h)),
        outputs=(jax.ShapeDtypeStruct((M, N), jnp.float32),),
        grid=(1,),
    )
    return executors.run(launch)[0]


def mixed(x):
    """A hash of 32 bits, whose products wrap around."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    return x ^ (x >> jnp.uint32(15))


FUNCTIONS = {
    "nothing": lambda x, *at: x,
    "a number": lambda x, *at: 0,
    "an infinity": lambda x, b, h, q, k: jnp.where(q >= k, x, -jnp.inf),
    "positions": lambda x, b, h, q, k: x + (b * 7 + h * 3 + q * 2 - k).astype(jnp.float32),
    "a table": lambda x, b, h, q, k: x + TABLE[h, q - k + N],
    "a row of a table": lambda x, b, h, q, k: x * TABLE[h][k],
    "a fixed element": lambda x, b, h, q, k: x * TABLE[1, 2] + TABLE[-1, k],
    "a table of a table": lambda x, b, h, q, k: x + TABLE[h, IDS[q] - IDS[k] + 14],
    "half": lambda x, b, h, q, k: x + (HALF[h, q] * HALF[b, k]).astype(jnp.float32),
    "a bool": lambda x, b, h, q, k: jnp.where(SEEN[q, k], x, -x),
    "outside": lambda x, b, h, q, k: x + TABLE[h, k * 5] + TABLE[h, q - 100],
    "take": lambda x, b, h, q, k: x + jnp.take(TABLE[0], k * 3, mode="clip"),
    "filled": lambda x, b, h, q, k: x + TABLE.at[h, k * 2].get(mode="fill", fill_value=2.0),
    "dynamic_index": lambda x, b, h, q, k: x + jax.lax.dynamic_index_in_dim(TABLE[0], q, 0, False),
    "known": lambda x, b, h, q, k: x * jnp.sum(TABLE) + jnp.exp(TABLE * 2).T[k, h],
    "division": lambda x, b, h, q, k: x + ((q - k) // 3 * 10 + (q - k) % 5).astype(jnp.float32),
    "remainder": lambda x, b, h, q, k: x + jax.lax.rem(q - k, 7).astype(jnp.float32) + x % 2.0,
    "clip": lambda x, *at: jnp.clip(x, -1, 1) + jax.lax.clamp(0.5, x, 2.0),
    "extremes": lambda x, b, h, q, k: jnp.maximum(x, 0.5) + jnp.minimum(q, k).astype(jnp.float32),
    "exponentials": lambda x, *at: jnp.exp(-abs(x)) + jnp.exp2(-abs(x)) + jnp.expm1(x / 50),
    "logarithms": lambda x, *at: jnp.log(abs(x) + 1) + jnp.log1p(abs(x) / 1e3) + jax.nn.softplus(x),
    "sigmoids": lambda x, *at: jnp.tanh(x) + jax.nn.sigmoid(x) + jax.nn.silu(x),
    "small": lambda x, *at: jnp.tanh(x * 1e-3) * 1e3 + jnp.tanh(x / 9),
    "roots": lambda x, *at: jnp.sqrt(abs(x)) + jax.lax.rsqrt(abs(x) + 1) + jax.lax.square(x),
    "powers": lambda x, b, h, q, k: x**3 + (abs(x) + 1) ** -2 + (abs(x) + 1) ** 1.5 + x**0,
    "signs": lambda x, b, h, q, k: jnp.sign(x) + abs(-x) + jnp.sign(q - k).astype(jnp.float32),
    "rounding": lambda x, *at: jnp.floor(x) + 2 * jnp.ceil(x) + 3 * jnp.round(x * 2),
    "away": lambda x, *at: jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO),
    "waves": lambda x, *at: jnp.sin(x) + jnp.cos(x) + jax.lax.erf(x),
    "logic": lambda x, b, h, q, k: jnp.where(((q > k) & ~(q == 3)) ^ (k < 9) | (q != k), x, 1.0),
    "bits": lambda x, b, h, q, k: x + ((q << 2 | k) & 29 ^ ~q >> 1).astype(jnp.float32),
    "a hash": lambda x, b, h, q, k: (
        x * (mixed((q * 32 + k).astype(jnp.uint32)) >> 20).astype(jnp.float32)
    ),
    "bitcast": lambda x, *at: jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x, jnp.int32) & -4096, jnp.float32
    ),
    "conversion": lambda x, *at: (
        x.astype(jnp.int32).astype(jnp.float32) + x.astype(jnp.bfloat16).astype(jnp.float32)
    ),
    "finite": lambda x, *at: (
        jnp.where(jnp.isfinite(x / 0), x, 1.0) + jnp.isnan(x).astype(jnp.float32)
    ),
    "select": lambda x, b, h, q, k: jax.lax.select_n(q % 3, x, 2 * x, -x),
    "gelu": lambda x, *at: jax.nn.gelu(x) + jax.nn.relu(x),
    "stopped": lambda x, b, h, q, k: x + jax.lax.stop_gradient(x * x) * TABLE[h, q],
    "clamped NaN": lambda x, b, h, q, k: jax.lax.clamp(0.5, jnp.where(q == k, jnp.nan, x), 2.0),
    "logical shift": lambda x, b, h, q, k: (
        x + jax.lax.shift_right_logical(k - q, 28).astype(jnp.float32)
    ),
    "integer to half": lambda x, b, h, q, k: x + (q * 37).astype(jnp.bfloat16).astype(jnp.float32),
    "power 0": lambda x, *at: jax.lax.integer_pow(x / 0.0, 0),
    "integer exponent": lambda x, b, h, q, k: (abs(x) + 1) ** (q % 5 - 2) * 2.0 ** -(h + 1),
    "constant condition": lambda x, b, h, q, k: jnp.where(~(q < 0) & (k > q), x, -x),
    "logarithm of 2": lambda x, *at: jnp.log2(abs(x) + 1),
    "checkpoint": lambda x, *at: jax.checkpoint(lambda x: jnp.sin(x) * x)(x),
}


def traced(function):
    with jax.numpy_dtype_promotion("standard"):
        return elementwise.trace("test", "function", function, INPUTS, "float32")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    with jax.numpy_dtype_promotion("standard"):
        program, arrays = traced(FUNCTIONS[name])
        expected = np.float32(everywhere(FUNCTIONS[name]))
    evaluated = np.broadcast_to(elementwise.evaluate(program, values(), arrays), (M, N))
    np.testing.assert_allclose(evaluated, expected, rtol=1e-6, atol=1e-6)
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=1)
    kernel = np.asarray(in_triton(program, arrays))
    np.testing.assert_allclose(kernel, expected, rtol=2e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(name):
    """Of the score and, added up, of all arrays, against those of the function by JAX."""
    with jax.numpy_dtype_promotion("standard"):
        program, arrays = traced(FUNCTIONS[name])
        derivative = elementwise.derivative(program, "score")
        d = jnp.cos(jnp.arange(M * N, dtype=jnp.float32)).reshape(M, N)

        def loss(score, arrays):
            _, *at = values()
            return jnp.sum(d * elementwise.evaluate(program, (score, *at), arrays))

        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]
        _, of_arrays = jax.grad(loss, (0, 1), allow_int=True)(values()[0], arrays)
        expected = jax.grad(lambda x: jnp.sum(d * everywhere(FUNCTIONS[name], x)))(values()[0])
    outputs = elementwise.evaluate(derivative.program, (*values(), d), arrays)
    d_score, reads = derivative.split(outputs if isinstance(outputs, tuple) else (outputs,))
    np.testing.assert_allclose(np.broadcast_to(d_score, (M, N)), expected, rtol=1e-5, atol=1e-5)
    assert derivative.arrays == tuple(i for i, is_ in enumerate(is_float) if is_)
    sums = [np.zeros(x.shape) for x in arrays]
    for number, gradient, indices in reads:
        clamped = tuple(np.clip(i, 0, n - 1) for i, n in zip(indices, arrays[number].shape))
        places = np.broadcast_arrays(*clamped, np.zeros((M, N)))[:-1]
        np.add.at(sums[number], tuple(places), np.broadcast_to(gradient, (M, N)))
    for number in derivative.arrays:
        right = np.float32(of_arrays[number])
        tolerance = 1e-5 if arrays[number].dtype == jnp.float32 else 2e-2
        scale = np.abs(right).max(initial=1)
        np.testing.assert_allclose(sums[number], right, rtol=0, atol=tolerance * scale)


@jax.custom_jvp
def halved(x, y):
    """A derivative that is not that of what it computes."""
    return x * y


halved.defjvps(lambda d, out, x, y: d / 2, lambda d, out, x, y: d * 3 * x)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), x), lambda x, d: (d * x,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, b, h, q, k: halved(x, x) + TABLE[h, k],
        lambda x, *at: straight_through(x) * x,
        lambda x, *at: jax.nn.relu(x) + 2 * jax.nn.softplus(x) + jax.nn.relu6(3 * x),
    ],
)
@pytest.mark.parametrize("score", [0.0, -1.5, 2.0, 60.0])
def test_custom_derivatives(function, score):
    """0 and 6 are where JAX's own functions need theirs."""
    at = (*map(jnp.int32, (1, 2, 3, 4)),)
    program, arrays = traced(function)
    with jax.numpy_dtype_promotion("standard"):
        expected = jax.grad(function)(jnp.float32(score), *at)
    derivative = elementwise.derivative(program, "score")
    operands = (jnp.float32(score), *at, jnp.float32(1))
    outputs = elementwise.evaluate(derivative.program, operands, arrays)
    d_score = outputs[0] if isinstance(outputs, tuple) else outputs
    by_jax = jax.grad(lambda x: elementwise.evaluate(program, (x, *at), arrays))(jnp.float32(score))
    np.testing.assert_allclose([d_score, by_jax], [expected] * 2, rtol=1e-6)


def test_custom_derivative_of_a_known_array():
    """What is computed outside of the program has its own derivative, too."""

    def loss(learned):
        function = lambda x, *at: x * straight_through(learned)[0]  # noqa: E731
        program, arrays = traced(function)
        return elementwise.evaluate(program, (jnp.float32(2), *at), arrays)

    at = (*map(jnp.int32, (1, 2, 3, 4)),)
    np.testing.assert_allclose(jax.grad(loss)(jnp.float32([1.5, 2])), [3, 0])


def leaves():
    return st.sampled_from(
        [lambda x, q, k: x, lambda x, q, k: q * 0.5, lambda x, q, k: k * 0.25 - 3]
    )


def branches(inner):
    unary = st.sampled_from([jnp.sin, jnp.tanh, jnp.abs, jnp.negative, jax.nn.sigmoid])
    binary = st.sampled_from([jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, jnp.minimum])
    return st.one_of(
        st.builds(lambda f, a: lambda *v: f(a(*v)), unary, inner),
        st.builds(lambda f, a, b: lambda *v: f(a(*v), b(*v)), binary, inner, inner),
        st.builds(
            lambda a, b, c: lambda *v: jnp.where(a(*v) > 0, b(*v), c(*v)), inner, inner, inner
        ),
    )


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.recursive(leaves(), branches, max_leaves=8))
def test_random_trees(tree):
    def function(x, b, h, q, k):
        return tree(jnp.tanh(x), q.astype(jnp.float32), k.astype(jnp.float32))

    program, arrays = traced(function)
    expected = everywhere(function)
    scale = max(1, float(jnp.abs(expected).max()))
    for result in (elementwise.evaluate(program, values(), arrays), in_triton(program, arrays)):
        result = np.broadcast_to(result, (M, N))
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * scale)


def test_equal_functions_are_equal_programs():
    first, second = (traced(lambda x, *at: x * 2 + TABLE[at[1], 0])[0] for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != traced(lambda x, *at: x * 3 + TABLE[at[1], 0])[0]


def test_dependence():
    program, _ = traced(lambda x, b, h, q, k: x + TABLE[h, 0 * b] * q)
    assert [program.depends(name) for name in INPUTS] == [True, True, True, True, False]
    dead, _ = traced(lambda x, b, h, q, k: (jnp.sin(x) * b, q.astype(jnp.float32))[1])
    assert [dead.depends(name) for name in INPUTS] == [False, False, False, True, False]


def test_positions_are_not_negative():
    """An index that is a position needs no case for counting from the end."""
    program, _ = traced(lambda x, b, h, q, k: x + TABLE[h, q + 2 * k])
    assert {x.op for x in program.instructions} == {"mul", "add", "read"}


def test_arrays_are_passed_once_and_numbers_not_at_all():
    program, arrays = traced(lambda x, b, h, q, k: x * TABLE[h, q] + TABLE[b, k] * np.float32(2))
    assert arrays == (TABLE,)
    assert program.arrays == (((3, M + N), "float32"),)
    number = jnp.float32(0.5)
    program, arrays = traced(lambda x, *at: x * number)
    assert arrays == ()
    assert Literal(0.5, "float32") in program.instructions[0].operands


def test_equal_constants():
    """A program is found again in spite of NaN; zeros of different sign are not one."""
    first, second = (traced(lambda x, *at: jnp.where(x > 0, x, jnp.nan))[0] for _ in range(2))
    assert first == second
    program, _ = traced(lambda x, *at: 1 / (x * 0.0) - 1 / (x * -0.0))
    assert sum(x.op == "mul" for x in program.instructions) == 2


def test_wide_integers():
    """With 64-bit types enabled ids are int64."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        ids = jnp.arange(N) // 3
        program, arrays = traced(lambda x, b, h, q, k: jnp.where(ids[q] == ids[k], x, 0.0))
        assert arrays[0].dtype == jnp.int64
        result = in_triton(program, arrays)
    expected = np.where(np.arange(M)[:, None] // 3 == np.arange(N) // 3, values()[0], 0)
    np.testing.assert_array_equal(result, expected)


def test_no_float64_in_a_kernel():
    with jax.enable_x64(True):
        inputs = INPUTS | {"score": "float64"}
        program, _ = elementwise.trace("test", "function", lambda x, *at: x * 2, inputs, "float64")
    with pytest.raises(NotImplementedError, match=r"mul of float64: .* write jnp\.float32"):
        elementwise.source(program, "function")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x, *at: jnp.fft.fft(x[None])[0].real, NotImplementedError, "got 'fft'; supported"),
        (
            lambda x, *at: jax.lax.fori_loop(0, at[2], lambda i, x: x * x, x),
            NotImplementedError,
            "got 'while'",
        ),
        (
            lambda x, *at: x + jnp.dot(TABLE[0], TABLE[1] * x),
            NotImplementedError,
            "got 'dot_general'",
        ),
        (lambda x, *at: x.astype(jnp.bfloat16), TypeError, "must return float32, got bfloat16"),
        (lambda x, *at: (x, x), TypeError, "must return a scalar, got .ShapeDtypeStruct"),
        (lambda x, *at: x + jnp.zeros(2), TypeError, "must return a scalar, got .*2,"),
        (lambda x, *at: None, TypeError, "must return a scalar, got None"),
        (lambda x, *at: at[0], TypeError, "must return float32, got int32"),
        (
            lambda x, *at: (jax.debug.print("{}", x), x)[1],
            NotImplementedError,
            "must have no side effects, got",
        ),
        (lambda x: x, TypeError, "must take .score, b, h, q_idx, kv_idx., got a function of .x."),
    ],
)
def test_errors(function, error, message):
    with pytest.raises(error, match=message):
        traced(function)

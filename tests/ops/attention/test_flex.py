"""flex_attention: functions of scalars, and the gradients of what they read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics import assert_within_budget
from tests.ops.attention.oracle import Shape, inputs
from tjk.ops import flash_attention, flex_attention, masks
from tjk.ops.attention import reference
from tjk.ops.masks import block_mask

SHAPE = Shape(B=2, T=70, S=75, N=4, K=2, H=16, V=16)
T, S, N = SHAPE.T, SHAPE.S, SHAPE.N
NAMES = ("output", "logsumexp", "d_query", "d_key", "d_value", "d_array")
IDS = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 4, (2, 80)), 1), jnp.int32)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(7).standard_normal(shape), jnp.float32)


def alibi(slopes):
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * jnp.abs(q_idx - kv_idx)


def soft_cap(cap):
    return lambda score, b, h, q_idx, kv_idx: cap * jnp.tanh(score / cap)


def distances(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + S - 1]


def pairs(bias):
    return lambda score, b, h, q_idx, kv_idx: score * (1 + bias[q_idx, kv_idx])


def by_row(gain):
    return lambda score, b, h, q_idx, kv_idx: score * jnp.exp(gain[b, q_idx])


def learned_cap(cap):
    return lambda score, b, h, q_idx, kv_idx: cap * jnp.tanh(score / cap)


def half(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx // 3].astype(jnp.float32)


SCORES = {
    "alibi": (alibi, 0.1 * normal(N)),
    "soft cap": (soft_cap, jnp.float32(0.9)),
    "relative positions": (distances, normal(N, T + S - 1)),
    "a factor of each pair": (pairs, normal(T, S)),
    "a factor of each row": (by_row, 0.3 * normal(SHAPE.B, T)),
    "a learned cap": (learned_cap, jnp.array(1.3)),
    "a table in bfloat16": (half, normal(N, S // 3).astype(jnp.bfloat16)),
}
MASKS = {
    "causal": masks.causal,
    "window": masks.sliding_window(9, 3),
    "prefix": masks.prefix_lm(jnp.array([5, 30], jnp.int32)),
    "documents": masks.document((IDS[:, :T], IDS[:, :S])),
    "dilated": masks.dilated(3),
    "combined": masks.causal & ~masks.sliding_window(4, 0) | masks.dilated(7),
    "of heads": lambda b, h, q_idx, kv_idx: (q_idx + h) % 2 == kv_idx % 2,
    "nothing": lambda b, h, q_idx, kv_idx: q_idx < 20,
}


def results(attend, operands, cotangents):
    @jax.jit
    def run(operands, cotangents):
        outputs, vjp = jax.vjp(attend, *operands)
        return *outputs, *vjp(cotangents)

    return run(tuple(operands), tuple(cotangents))


def check(
    implementation, make=None, array=None, mask=None, dtype="float32", shape=SHAPE, **options
):
    """Fails unless output, logsumexp and all gradients are within the budget."""
    drawn = inputs(shape)
    operands = [jnp.asarray(x, dtype) for x in drawn[:3]]
    operands += [] if array is None else [array]
    cotangents = [jnp.asarray(drawn[3], dtype), jnp.float32(drawn[4])]

    def flex(query, key, value, array=None):
        return flex_attention(
            *(query, key, value),
            score_mod=None if make is None else make(array),
            mask_mod=mask,
            implementation=implementation,
            precision="highest",
            return_residual=True,
            **options,
        )

    def definition(query, key, value, array=None):
        visible = None
        if mask is not None:
            visible = mask(*(jnp.asarray(x, jnp.int32) for x in np.ogrid[: shape.B, :N, :T, :S]))

        def score(logits, *at):
            modified = make(array)(logits, *(x.astype(jnp.int32) for x in at))
            return modified.astype(logits.dtype)

        output, logsumexp = reference.attention(
            *(query, key, value, None, visible, None, None),
            scale=options.get("scale", query.shape[-1] ** -0.5),
            window=(None, None),
            score=None if make is None else score,
        )
        return output, jnp.moveaxis(logsumexp, 1, 2)

    actual = results(flex, operands, cotangents)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        exact, plain = (
            results(definition, cast[:-2], cast[-2:])
            for cast in (
                [jnp.asarray(np.asarray(x), wide) for x in (*operands, *cotangents)]
                for wide in ("float64", dtype)
            )
        )
    for name, a, e, p in zip(NAMES, actual, exact, plain, strict=False):
        # Weights made again from a rounded logsumexp, and dS = P (dP - delta) of two sums; an
        # element that many logits read adds up that many.
        size = np.abs(np.asarray(e)[np.isfinite(e)]).max(initial=0)
        inherent = 0.0
        if name.startswith("d_"):
            inherent = 16 * 2.0**-23 * (size + (30 if name == "d_array" else 1))
        assert_within_budget(name, a, np.asarray(e), np.asarray(p), inherent=inherent)


@pytest.mark.parametrize("name", SCORES)
def test_scores(implementation, name):
    make, array = SCORES[name]
    check(implementation, make, array)


@pytest.mark.parametrize("name", MASKS)
def test_masks(implementation, name):
    check(implementation, mask=MASKS[name])


@pytest.mark.parametrize(
    ("score", "mask"),
    [("alibi", "causal"), ("relative positions", "documents"), ("soft cap", "of heads")],
)
def test_scores_and_masks(implementation, score, mask):
    make, array = SCORES[score]
    check(implementation, make, array, MASKS[mask], scale=-0.4)


def test_a_mask_by_the_score(implementation):
    """What the score makes -inf adds no gradient, though its slope there is not a number."""
    query, key, value = (jnp.float32(x) for x in inputs(SHAPE)[:3])

    def by_score(score, b, h, q_idx, kv_idx):
        apart = (q_idx - kv_idx).astype(jnp.float32)
        return jnp.where(apart >= 0, score - gain * jnp.sqrt(apart), -jnp.inf)

    def by_mask(score, b, h, q_idx, kv_idx):
        return score - gain * jnp.sqrt(jnp.maximum(q_idx - kv_idx, 0).astype(jnp.float32))

    def gradients(score_mod, mask_mod):
        nonlocal gain

        def loss(query, new_gain):
            nonlocal gain
            gain = new_gain
            options = {"score_mod": score_mod, "mask_mod": mask_mod, "precision": "highest"}
            return jnp.sum(
                jnp.sin(flex_attention(query, key, value, implementation=implementation, **options))
            )

        return jax.grad(loss, (0, 1))(query, jnp.float32(0.5))

    gain = None
    for a, e in zip(gradients(by_score, None), gradients(by_mask, masks.causal)):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def test_nothing_modified_is_flash_attention(implementation):
    query, key, value = (jnp.float32(x) for x in inputs(SHAPE)[:3])
    options = {"implementation": implementation, "precision": "highest"}
    plain = flash_attention(query, key, value, **options)
    np.testing.assert_array_equal(flex_attention(query, key, value, **options), plain)
    same = flex_attention(
        *(query, key, value),
        score_mod=lambda score, b, h, q_idx, kv_idx: score,
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= 0,
        **options,
    )
    np.testing.assert_allclose(same, plain, rtol=1e-5, atol=1e-6)


def test_a_block_mask_made_once(implementation):
    """Alone it shows whole tiles; with its mask it changes nothing."""
    query, key, value = (jnp.float32(x) for x in inputs(SHAPE)[:3])
    options = {"implementation": implementation, "precision": "highest"}
    mask = MASKS["of heads"]
    known = jax.jit(lambda: block_mask(mask, T, S, heads=N))()
    asked = flex_attention(query, key, value, mask_mod=mask, **options)
    told = flex_attention(query, key, value, mask_mod=mask, block_mask=known, **options)
    np.testing.assert_array_equal(asked, told)
    tiles = block_mask(masks.sliding_window(0, 0), T, S)
    alone = flex_attention(query, key, value, block_mask=tiles, **options)

    def same_tile(b, h, q_idx, kv_idx):
        return q_idx // 64 == kv_idx // 64

    expected = flex_attention(query, key, value, mask_mod=same_tile, **options)
    np.testing.assert_allclose(alone, expected, rtol=1e-5, atol=1e-6)


def test_kinds():
    kinds = block_mask(masks.causal, 130, 200).kinds[0, 0]
    np.testing.assert_array_equal(kinds, [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0]])
    kinds = block_mask(masks.dilated(1), 1, 65).kinds[0, 0]
    np.testing.assert_array_equal(kinds, [[2, 2]])
    kinds = block_mask(masks.document(IDS[:, :70]), 70, 70, batch=2).kinds
    assert kinds.shape == (2, 1, 2, 2)
    assert block_mask(lambda *at: at[2] < 0, 0, 9).kinds.shape == (1, 1, 0, 1)


def test_a_window_visits_few_tiles():
    window = masks.sliding_window(256, 0)
    assert float(block_mask(window, 4096, 4096).visited()) < 0.08
    assert float(block_mask(window & masks.causal, 4096, 4096).visited()) < 0.08


def test_masks_are_what_they_say():
    at = tuple(jnp.asarray(x, jnp.int32) for x in np.ogrid[:2, :1, :6, :6])
    _, _, q, k = at
    np.testing.assert_array_equal(masks.causal(*at), k <= q)
    np.testing.assert_array_equal(masks.sliding_window(1, 2)(*at), (k >= q - 1) & (k <= q + 2))
    np.testing.assert_array_equal(masks.prefix_lm(3)(*at), (k < 3) | (k <= q))
    np.testing.assert_array_equal((~masks.causal)(*at), k > q)
    np.testing.assert_array_equal(
        (masks.causal | masks.dilated(2))(*at), (k <= q) | ((q - k) % 2 == 0)
    )


def test_vmap_and_unbatched(implementation):
    query, key, value = (jnp.float32(x) for x in inputs(SHAPE)[:3])
    slopes = SCORES["alibi"][1]
    attend = functools.partial(
        flex_attention,
        score_mod=alibi(slopes),
        mask_mod=masks.causal,
        implementation=implementation,
    )
    expected = attend(query, key, value)
    for i in range(SHAPE.B):
        np.testing.assert_allclose(
            attend(query[i], key[i], value[i]), expected[i], rtol=1e-5, atol=1e-6
        )
    np.testing.assert_allclose(jax.vmap(attend)(query, key, value), expected, rtol=1e-5, atol=1e-6)


def test_arrays_of_an_outer_trace(implementation):
    """What is closed over may be a tracer, of jit, grad and vmap."""
    query, key, value = (jnp.float32(x[:1, :20]) for x in inputs(SHAPE)[:3])

    @jax.jit
    def loss(slopes):
        output = flex_attention(
            *(query, key, value), score_mod=alibi(jnp.exp(slopes)), implementation=implementation
        )
        return jnp.sum(jnp.sin(output))

    slopes = jnp.stack([normal(N), -normal(N)])
    mapped = jax.vmap(jax.grad(loss))(slopes)
    for one, gradient in zip(slopes, mapped):
        np.testing.assert_allclose(jax.grad(loss)(one), gradient, rtol=1e-4, atol=1e-5)
        step = 1e-2 * jnp.ones(N)
        slope = (loss(one + step) - loss(one - step)) / 2e-2
        np.testing.assert_allclose(slope, gradient.sum(), rtol=3e-2, atol=2e-3)


def test_a_function_in_float64_is_for_xla():
    """With jax_enable_x64 Python's 0.5 times an integer is one."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (0.5 * (q_idx - kv_idx)).astype(score.dtype)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        default = flex_attention(ONES, ONES, ONES, score_mod=score_mod)
        named = flex_attention(ONES, ONES, ONES, score_mod=score_mod, implementation="xla")
        np.testing.assert_array_equal(default, named)
        with pytest.raises(NotImplementedError, match="a function that computes in float64"):
            flex_attention(ONES, ONES, ONES, score_mod=score_mod, implementation="triton")


ONES = jnp.ones((1, 8, 1, 16))


@pytest.mark.parametrize(
    ("options", "error", "rule"),
    [
        (
            {"score_mod": lambda score, b, h, q, k: (score, q)},
            TypeError,
            "score_mod must return a scalar",
        ),
        ({"score_mod": lambda score, *at: score * jnp.ones(3)}, TypeError, "must return a scalar"),
        ({"score_mod": lambda score, b, h, q, k: q}, TypeError, "must return float32, got int32"),
        ({"score_mod": lambda score, b: score}, TypeError, "must take .score, b, h, q_idx, kv_idx"),
        ({"mask_mod": lambda b, h, q, k: q}, TypeError, "mask_mod must return bool, got int32"),
        (
            {
                "score_mod": lambda score, *at: jax.lax.cond(
                    score > 0, lambda: score, lambda: -score
                )
            },
            NotImplementedError,
            "supported operations, got 'cond'; supported are .*abs, add, and",
        ),
        (
            {"score_mod": lambda score, *at: score + jnp.sum(jnp.ones((9, 9))[at[0]])},
            NotImplementedError,
            "reduce_sum",
        ),
        ({"score_mod": lambda score, *at: _print(score)}, NotImplementedError, "no side effects"),
        ({"block_mask": block_mask(masks.causal, 8, 9)}, ValueError, "block_mask must be for T=8"),
        (
            {"block_mask": block_mask(lambda b, h, q, k: q > h, 8, 8, heads=3)},
            ValueError,
            "for heads=1 or all, got batch=1, heads=3",
        ),
    ],
)
def test_errors(implementation, options, error, rule):
    with pytest.raises(error, match=rule):
        flex_attention(ONES, ONES, ONES, implementation=implementation, **options)


def _print(score):
    jax.debug.print("{}", score)
    return score


def test_errors_of_masks():
    with pytest.raises(ValueError, match="batch must be given: the mask depends on b"):
        block_mask(masks.document(IDS), 80, 80)
    with pytest.raises(ValueError, match=r"segment_ids must be integers of shape \(B, L\)"):
        masks.document(jnp.ones(3))
    with pytest.raises(ValueError, match="stride must be positive, got 0"):
        masks.dilated(0)
    with pytest.raises(ValueError, match="n must be a number or have shape"):
        masks.prefix_lm(jnp.ones((2, 2), jnp.int32))

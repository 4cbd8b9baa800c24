"""Bad arguments, and what is legal although there is nothing to do."""

import re

import jax
import jax.numpy as jnp
import pytest

from tjk.ops.delta_rule import gated_delta_rule, gated_delta_rule_step


def _arguments(**changes):
    """Structs of fitting shapes, with some replaced by (shape, dtype)."""
    structs = {
        **dict.fromkeys("qk", ((2, 9, 3, 16), "float32")),
        "v": ((2, 9, 3, 8), "float32"),
        **dict.fromkeys(("g", "beta"), ((2, 9, 3), "float32")),
    }
    return {k: jax.ShapeDtypeStruct(*v) for k, v in (structs | changes).items()}


WRONG = {
    "q": ({"q": ((2, 9, 16), "float32")}, ValueError, "q must have shape (B, L, H, K), got"),
    "k": (
        {"k": ((2, 9, 3, 15), "float32")},
        ValueError,
        "k must have shape (B, L, H, K) with B=2, L=9, H=3, K=16, got (2, 9, 3, 15)",
    ),
    "v": (
        {"v": ((2, 8, 3, 8), "float32")},
        ValueError,
        "v must have shape (B, L, H, V) with B=2, L=9, H=3, got (2, 8, 3, 8)",
    ),
    "width": ({"v": ((2, 9, 3, 0), "float32")}, ValueError, "widths K and V must be positive"),
    "g": ({"g": ((2, 9, 1), "float32")}, ValueError, "g must have shape (B, L, H) with B=2, L=9"),
    "beta": ({"beta": ((2, 9), "float32")}, ValueError, "beta must have shape (B, L, H) with"),
    "state": (
        {"initial_state": ((2, 3, 8, 16), "float32")},
        ValueError,
        "initial_state must have shape (B, H, K, V) with B=2, H=3, K=16, V=8, got (2, 3, 8, 16)",
    ),
    "ids": (
        {"segment_ids": ((2, 8), "int32")},
        ValueError,
        "segment_ids must have shape (B, L) with B=2, L=9, got (2, 8)",
    ),
    "kind": ({"q": ((2, 9, 3, 16), "int32")}, TypeError, "q must have dtype float32 or bfloat16"),
    "kinds": (
        {"v": ((2, 9, 3, 8), "bfloat16")},
        TypeError,
        "v must have the dtype of q (float32), got bfloat16",
    ),
    "gate": (
        {"g": ((2, 9, 3), "bfloat16")},
        TypeError,
        "g must have dtype float32, got bfloat16",
    ),
    "state's kind": (
        {"initial_state": ((2, 3, 16, 8), "bfloat16")},
        TypeError,
        "initial_state must have dtype float32, got bfloat16",
    ),
    "ids' kind": (
        {"segment_ids": ((2, 9), "float32")},
        TypeError,
        "segment_ids must be integers, got float32",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands(implementation, changes, error, message):
    with pytest.raises(error, match=re.escape(f"gated_delta_rule: {message}")):
        jax.eval_shape(
            lambda **x: gated_delta_rule(**x, implementation=implementation),
            **_arguments(**changes),
        )


OPTIONS = {
    "chunk_size must be 16, 32, 64 or 128, got 48": {"chunk_size": 48},
    "chunk_size must be 16, 32, 64 or 128, got 256": {"chunk_size": 256},
    "precision must be None, 'default'": {"precision": "fast"},
    "implementation must be None, 'triton' or 'xla', got 'cuda'": {"implementation": "cuda"},
}


@pytest.mark.parametrize(("message", "options"), OPTIONS.items(), ids=OPTIONS)
def test_options(message, options):
    with pytest.raises(ValueError, match=re.escape(f"gated_delta_rule: {message}")):
        jax.eval_shape(lambda **x: gated_delta_rule(**x, **options), **_arguments())


def test_what_triton_does_not_take():
    wide = dict.fromkeys("qk", ((2, 9, 3, 129), "float32"))

    def call(implementation, **changes):
        return jax.eval_shape(
            lambda **x: gated_delta_rule(**x, implementation=implementation),
            **_arguments(**changes),
        )

    with pytest.raises(NotImplementedError, match=r"does not take K above 128 \(K=129\)"):
        call("triton", **wide)
    assert call(None, **wide).shape == (2, 9, 3, 8)
    with jax.enable_x64(True):
        wide = {name: (x.shape, "float64") for name, x in _arguments().items()}
        with pytest.raises(NotImplementedError, match="does not take float64"):
            call("triton", **wide)
        assert call(None, **wide).dtype == jnp.float64


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"state": jnp.zeros((2, 3, 8, 16))}, ValueError, "state must have shape (B, H, K, V)"),
        ({"k": jnp.zeros((2, 3, 8))}, ValueError, "k must have shape (B, H, K) with B=2, H=3"),
        ({"g": jnp.zeros((2, 1))}, ValueError, "g must have shape (B, H) with B=2, H=3"),
        ({"v": jnp.zeros((2, 3, 8), "bfloat16")}, TypeError, "v must have the dtype of q"),
    ],
)
def test_step(changes, error, message):
    x = {"state": jnp.zeros((2, 3, 16, 8)), **dict.fromkeys("qk", jnp.zeros((2, 3, 16)))}
    x |= {"v": jnp.zeros((2, 3, 8)), **dict.fromkeys(("g", "beta"), jnp.zeros((2, 3)))}
    with pytest.raises(error, match=re.escape(f"gated_delta_rule_step: {message}")):
        gated_delta_rule_step(**(x | changes))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_nothing_to_do(implementation, axis):
    """No batch, no time or no head: the state stays."""
    shape = [2, 3, 2]
    shape[axis] = 0
    k, gate = jnp.ones((*shape, 4)), jnp.ones(shape)
    options = {"implementation": implementation, "return_final_state": True}
    start = jnp.ones((shape[0], shape[2], 4, 4))
    o, state = gated_delta_rule(k, k, k, -gate, gate, initial_state=start, **options)
    assert o.shape == k.shape
    assert (state == start).all()
    assert not gated_delta_rule(k, k, k, -gate, gate, **options)[1].any()

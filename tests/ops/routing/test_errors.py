"""Bad arguments: the same error for every implementation, at trace time."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tjk.ops import load_balance_loss, route_top_k, router_z_loss, sort_by_expert

LOGITS = np.ones((6, 4), np.float32)
EXPERTS = np.ones((6, 2), np.int32)

ROUTE = {
    "rank": ({"logits": LOGITS[0]}, ValueError, "logits must have shape (M, E), got (4,)"),
    "integers": (
        {"logits": EXPERTS},
        TypeError,
        "logits must have dtype float32 or bfloat16 or float16 or float64, got int32",
    ),
    "k of 0": ({"k": 0}, ValueError, "k must be an int from 1 to the number of experts, 4, got 0"),
    "k above E": ({"k": 5}, ValueError, "k must be an int from 1 to the number of experts, 4, got"),
    "k of no int": ({"k": 2.0}, ValueError, "k must be an int from 1 to the number of experts, 4"),
    "no experts": (
        {"logits": LOGITS[:, :0], "k": 1},
        ValueError,
        "k must be an int from 1 to the number of experts, 0, got 1",
    ),
    "normalize": (
        {"normalize": "none"},
        ValueError,
        "normalize must be 'selected' or 'all', got 'none'",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), ROUTE.values(), ids=ROUTE)
def test_route_top_k(implementation, change, error, message):
    with pytest.raises(error, match=re.escape(f"route_top_k: {message}")):
        route_top_k(**{"logits": LOGITS, "k": 2, "implementation": implementation} | change)


SORT = {
    "rank": (
        {"experts": EXPERTS[None]},
        ValueError,
        "experts must have shape (M, k) or (M,), got (1, 6, 2)",
    ),
    "no axis": ({"experts": EXPERTS[0, 0]}, ValueError, "experts must have shape (M, k) or (M,)"),
    "dtype": (
        {"experts": np.uint8(EXPERTS)},
        TypeError,
        "experts must have dtype int32, got uint8",
    ),
    "no experts": (
        {"num_experts": 0},
        ValueError,
        "num_experts must be an int of at least 1, got 0",
    ),
    "no int": ({"num_experts": 3.0}, ValueError, "num_experts must be an int of at least 1"),
}


@pytest.mark.parametrize(("change", "error", "message"), SORT.values(), ids=SORT)
def test_sort_by_expert(implementation, change, error, message):
    right = {"experts": EXPERTS, "num_experts": 4, "implementation": implementation}
    with pytest.raises(error, match=re.escape(f"sort_by_expert: {message}")):
        sort_by_expert(**right | change)


def test_too_many_slots(implementation):
    experts = jax.ShapeDtypeStruct((2**30, 2), jnp.int32)
    sort = functools.partial(sort_by_expert, num_experts=4, implementation=implementation)
    with pytest.raises(ValueError, match="there must be fewer than 2\\^31 slots"):
        jax.eval_shape(sort, experts)


def test_implementation():
    message = "implementation must be None, 'triton' or 'xla', got 'cuda'"
    with pytest.raises(ValueError, match=f"route_top_k: {message}"):
        route_top_k(LOGITS, 2, implementation="cuda")
    with pytest.raises(ValueError, match=f"sort_by_expert: {message}"):
        sort_by_expert(EXPERTS, 4, implementation="cuda")


def test_triton_by_name_never_falls_back():
    wide = jax.ShapeDtypeStruct((3, 1025), jnp.float32)
    route = functools.partial(route_top_k, k=2)
    with pytest.raises(NotImplementedError, match=r"does not take 1025 experts \(at most 1024\)"):
        jax.eval_shape(functools.partial(route, implementation="triton"), wide)
    assert jax.eval_shape(route, wide)[0].shape == (3, 2)
    with jax.enable_x64(True):
        double = jax.ShapeDtypeStruct((3, 8), jnp.float64)
        with pytest.raises(NotImplementedError, match="does not take float64; use implementation"):
            jax.eval_shape(functools.partial(route, implementation="triton"), double)
        assert jax.eval_shape(route, double)[0].dtype == jnp.float64


LOSSES = {
    "rank": ({"logits": LOGITS[0]}, ValueError, "logits must have shape (M, E), got (4,)"),
    "dtype": ({"logits": EXPERTS}, TypeError, "logits must have dtype float32 or bfloat16 or"),
    "tokens": (
        {"experts": EXPERTS[:5]},
        ValueError,
        "experts must have shape (M, k) with M=6, got (5, 2)",
    ),
    "no k": (
        {"experts": EXPERTS[:, 0]},
        ValueError,
        "experts must have shape (M, k) with M=6, got (6,)",
    ),
    "kind": (
        {"experts": np.float32(EXPERTS)},
        TypeError,
        "experts must have dtype int32, got float32",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), LOSSES.values(), ids=LOSSES)
def test_losses(change, error, message):
    with pytest.raises(error, match=re.escape(f"load_balance_loss: {message}")):
        load_balance_loss(**{"logits": LOGITS, "experts": EXPERTS} | change)
    if "logits" in change:
        with pytest.raises(error, match=re.escape(f"router_z_loss: {message}")):
            router_z_loss(**change)

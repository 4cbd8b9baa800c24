"""gated_delta_rule under JAX's transformations."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.delta_rule.oracle import Shape, cast
from tjk import executors
from tjk.launch import recording
from tjk.ops.delta_rule import gated_delta_rule, gated_delta_rule_step

SHAPE = Shape(B=2, L=20, H=1, K=8, V=8)


@pytest.fixture
def rule(implementation):
    return functools.partial(
        gated_delta_rule, implementation=implementation, precision="highest", chunk_size=16
    )


def _arguments():
    return cast(SHAPE, "float32")[:5]


def _close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mapped", [(0,), (2, 4), (0, 1, 2, 3, 4)])
def test_vmap(rule, mapped):
    operands = _arguments()
    axes = [0 if i in mapped else None for i in range(5)]
    stacked = [jnp.stack([x, x / 2]) if i in mapped else x for i, x in enumerate(operands)]
    o = jax.jit(jax.vmap(rule, axes))(*stacked)
    halves = [x / 2 if i in mapped else x for i, x in enumerate(operands)]
    _close(o[0], rule(*operands))
    _close(o[1], rule(*halves))


def test_vmap_folds_into_the_batch():
    launches = {}
    for name, wrap in (("plain", lambda f: f), ("mapped", jax.vmap)):
        rule = functools.partial(gated_delta_rule, implementation="triton")
        stacked = [jnp.stack([x]) if name == "mapped" else x for x in _arguments()]
        with recording() as launches[name]:
            jax.eval_shape(wrap(rule), *stacked)
    assert [x.name for x in launches["plain"]] == [x.name for x in launches["mapped"]]


def test_gradient_of_vmap(rule):
    q, *rest = _arguments()

    def loss(q):
        return jnp.sum(jnp.sin(rule(q, *rest)))

    ours = jax.jit(jax.grad(lambda q: jax.vmap(loss)(q).sum()))(jnp.stack([q, 2 * q]))
    for i in range(2):
        _close(ours[i], jax.grad(loss)((i + 1) * q))


def test_remat_and_scan(rule):
    operands = _arguments()

    def plain(*operands):
        return jnp.sum(jnp.sin(rule(*operands)))

    def wrapped(*operands):
        def step(carry, _):
            return carry + jax.checkpoint(plain)(*operands), None

        return jax.lax.scan(step, jnp.zeros(()), jnp.arange(1))[0]

    for a, b in zip(jax.grad(plain, (0, 3))(*operands), jax.grad(wrapped, (0, 3))(*operands)):
        _close(a, b)


def _lowered_launches(policy: str) -> list[str]:
    """Kernels in the gradient's program for a GPU, from a process where Triton compiles."""
    names = jax.checkpoint_policies.save_only_these_names("gated_delta_rule_states")

    def loss(*operands):
        return jnp.sum(gated_delta_rule(*operands))

    loss = {
        "no remat": loss,
        "nothing": jax.checkpoint(loss),
        "names": jax.checkpoint(loss, policy=names),
    }[policy]
    with executors.target(86):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4))).trace(*_arguments())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @triton_kernel_call", text)


@pytest.mark.parametrize(("policy", "count"), [("no remat", 3), ("names", 3), ("nothing", 4)])
def test_remat_by_name_runs_the_forward_pass_once(native, policy, count):
    """One launch forward and two backward, for one part of time."""
    assert len(native.submit(_lowered_launches, policy).result()) == count


def test_inference_keeps_no_states():
    with recording() as launches:
        jax.eval_shape(functools.partial(gated_delta_rule, implementation="triton"), *_arguments())
    (outputs,) = (launch for launch in launches if launch.name == "delta_rule_outputs")
    assert [out.shape for out in outputs.outputs] == [(2, 20, 1, 8), (2, 0), (2, 1, 8, 8)]


def test_gradient_of_step():
    """A step's gradient is that of a scan of one token."""
    q, k, v, g, beta, state = (x[:, 0] for x in cast(SHAPE, "float32")[:6])
    state = cast(SHAPE, "float32")[5]

    def by_step(state, *token):
        return jnp.sum(jnp.sin(gated_delta_rule_step(state, *token)[0]))

    def by_scan(state, *token):
        o = gated_delta_rule(
            *(x[:, None] for x in token), initial_state=state, implementation="xla"
        )
        return jnp.sum(jnp.sin(o))

    operands = (state, q, k, v, g, beta)
    every = tuple(range(6))
    for a, b in zip(jax.grad(by_step, every)(*operands), jax.grad(by_scan, every)(*operands)):
        _close(a, b)


def test_segments_of_a_mapped_batch(rule):
    operands = _arguments()
    ids = jnp.asarray(np.arange(20) // 7 * np.ones((2, 2, 1), int))
    stacked = [jnp.stack([x, -x]) for x in operands[:3]]
    o = jax.vmap(lambda q, k, v, ids: rule(q, k, v, *operands[3:], segment_ids=ids))(*stacked, ids)
    _close(o[1], rule(*(-x for x in operands[:3]), *operands[3:], segment_ids=ids[1]))

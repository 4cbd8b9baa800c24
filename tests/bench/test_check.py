"""No time without a passing check: wrong models must not pass, right ones must."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.check import Checker, CheckFailed, judge
from bench.step import jitted_step, one_by_one
from bench.suites import moe, transformer
from tjk.ops.moe import reference

pytestmark = pytest.mark.usefixtures("two_blocks")

SIZES = {"suite": "transformer", "attention": "tjk", "tokens": 12, "batch": 1, "model_dim": 32}


@pytest.fixture(scope="module")
def checker():
    """References are shared by the tests, as they are by the cases of a run."""
    return Checker()


def outcome_of(problem, op, model):
    step = jitted_step(model, op, problem.learning_rate)
    return step(jax.tree.map(jnp.copy, problem.params), *problem.inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["forward", "train_step"])
def test_right_model_passes_and_wrong_ones_do_not(checker, op, dtype):
    case = {**SIZES, "dtype": dtype, "op": op}
    problem = transformer.problem(case)
    passed = checker.check(case, problem, outcome_of(problem, op, problem.measured))
    assert 0 <= passed["check_error"] <= passed["check_bound"] < (0.1 if op == "forward" else 0.3)

    def without_the_last_key(params, x):
        y = problem.measured(params, x)
        return y.at[:, -1].set(problem.measured(params, x[:, :-1])[:, -1])

    def too_large_by_a_tenth(params, x):
        return problem.measured(params, x) * jnp.asarray(1.1, x.dtype)

    for wrong in (without_the_last_key, without_the_last_block(problem), too_large_by_a_tenth):
        with pytest.raises(CheckFailed, match="exceeds"):
            checker.check(case, problem, outcome_of(problem, op, wrong))


def without_the_last_block(problem):
    """The last block's two output layers are ignored, so that it adds nothing."""

    def model(params, x):
        last = dict(params["block_1"])
        for name in ("output", "mlp_out"):
            last[name] = jax.tree.map(jnp.zeros_like, last[name])
        return problem.measured({**params, "block_1": last}, x)

    return model


def test_train_step_is_checked_for_each_layer(checker):
    case = {**SIZES, "dtype": "float32", "op": "train_step"}
    problem = transformer.problem(case)
    loss, params = outcome_of(problem, "train_step", problem.measured)
    for name in ("value", "norm_mlp"):
        wrong = {**params, "block_1": {**params["block_1"], name: problem.params["block_1"][name]}}
        with pytest.raises(CheckFailed, match=rf"block_1\.{name}: error 1 exceeds"):
            checker.check(case, problem, (loss, wrong))
    with pytest.raises(CheckFailed, match=r"loss: error 0\.01 exceeds"):
        checker.check(case, problem, (loss * 1.01, params))


MOE = {
    **{"suite": "moe", "impl": "tjk", "tokens": 24, "experts": 4, "top_k": 2},
    **{"d_model": 16, "d_hidden": 32},
}


def without_the_last_slot(*operands):
    *others, weights, experts = operands
    return reference.moe_mlp(*others, weights.at[-1, -1].set(0), experts)


def with_even_weights(*operands):
    *others, weights, experts = operands
    return reference.moe_mlp(*others, jnp.full_like(weights, 0.5), experts)


def of_the_next_expert(*operands):
    *others, experts = operands
    return reference.moe_mlp(*others, (experts + 1) % 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["forward", "train_step"])
def test_right_expert_layer_passes_and_wrong_ones_do_not(checker, monkeypatch, op, dtype):
    case = {**MOE, "dtype": dtype, "op": op}
    problem = moe.problem(case)
    passed = checker.check(case, problem, outcome_of(problem, op, problem.measured))
    assert 0 <= passed["check_error"] <= passed["check_bound"] < 0.1
    for layer in (without_the_last_slot, with_even_weights, of_the_next_expert):
        monkeypatch.setitem(moe._LAYERS, "tjk", layer)
        wrong = moe.problem(case).measured
        with pytest.raises(CheckFailed, match="exceeds"):
            checker.check(case, problem, outcome_of(problem, op, wrong))


def test_moe_train_step_is_checked_for_the_router_and_each_matrix(checker):
    case = {**MOE, "dtype": "float32", "op": "train_step"}
    problem = moe.problem(case)
    loss, params = outcome_of(problem, "train_step", problem.measured)
    for name in ("router", "gate", "up", "down"):
        wrong = {**params, name: problem.params[name]}
        with pytest.raises(CheckFailed, match=f"{name}: error 1 exceeds"):
            checker.check(case, problem, (loss, wrong))


def test_references_choose_experts_by_the_models_float32_logits():
    """Logits of 1 and 1 + 2^-30: the same in float32, where the lower expert is chosen then."""
    case = {**MOE, "dtype": "float32", "op": "forward", "top_k": 1, "experts": 2}
    problem = moe.problem(case)
    router = jnp.zeros((16, 2)).at[0].set(1.0).at[1, 1].set(2.0**-30)
    params = problem.params | {"router": {"weight": router}}
    problem = dataclasses.replace(problem, params=params, inputs=(jnp.ones((24, 16)),))
    output = outcome_of(problem, "forward", problem.measured)
    assert Checker().check(case, problem, output)["check_error"] < 1e-6


def test_nan_fails(checker):
    case = {**SIZES, "dtype": "float32", "op": "forward"}
    problem = transformer.problem(case)
    output = outcome_of(problem, "forward", problem.measured)
    with pytest.raises(CheckFailed, match="output: error nan"):
        checker.check(case, problem, output.at[0, 2, 3].set(jnp.nan))


def test_budget_follows_plain_jax_in_the_same_dtype():
    case = {**SIZES, "dtype": "bfloat16", "op": "forward"}
    problem = transformer.problem(case)
    output = outcome_of(problem, "forward", problem.measured)
    bound = Checker().check(case, problem, output)["check_bound"]

    def coarse(params, x):
        return problem.exact(params, x.astype(jnp.float32)).astype(jnp.float8_e4m3fn)

    coarse_bound = Checker().check(case, dataclasses.replace(problem, plain=coarse), output)
    assert coarse_bound["check_bound"] > 2 * bound


def test_judge_names_the_result_nearest_to_its_bound():
    errors, bounds = {"a": 1e-3, "b": 1e-4}, {"a": 1e-2, "b": 2e-4}
    assert judge(errors, bounds) == {"check_of": "b", "check_error": 1e-4, "check_bound": 2e-4}
    with pytest.raises(CheckFailed, match=r"b: error 0\.0003 exceeds 0\.0002"):
        judge({"a": 1e-3, "b": 3e-4}, bounds)


def test_train_step_is_gradient_descent_on_the_mean_square():
    def model(params, x):
        return params["w"] * x

    x = jnp.asarray([1.0, 2.0, 3.0])
    loss, params = jitted_step(model, "train_step", 0.1)({"w": jnp.asarray(2.0)}, x)
    assert float(loss) == pytest.approx(4 * 14 / 3)
    assert float(params["w"]) == pytest.approx(2 - 0.1 * 2 * 2 * 14 / 3)


def test_train_step_donates_its_parameters():
    params = {"w": jnp.ones((4,))}
    jitted_step(lambda params, x: params["w"] * x, "train_step", 0.1)(params, jnp.ones((4,)))
    assert params["w"].is_deleted()


def test_one_by_one_is_the_same_function_and_gradient():
    def model(w, x, y):
        return jnp.tanh(x @ w) * y[:, None]

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((3, 4), (5, 3), (5,))
    arguments = [jax.random.normal(k, shape) for k, shape in zip(keys, shapes)]

    def total(model, *arguments):
        return jnp.sin(model(*arguments)).sum()

    mapped = one_by_one(model)
    np.testing.assert_allclose(mapped(*arguments), model(*arguments), rtol=1e-6)
    for position in range(3):
        expected = jax.grad(total, position + 1)(model, *arguments)
        gradient = jax.grad(total, position + 1)(mapped, *arguments)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)

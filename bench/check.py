"""No time without a passing check: a step's results against the definition in float64.

Error of a result = max |result - exact| / max |exact|. Its budget is twice the error of plain JAX
in the same dtype, plus one rounding of the operands:

    error <= 2 error(plain) + epsilon

with epsilon = 2^-7 in bfloat16, 2^-10 in float32 where matrix products round to TF32 (a GPU, by
default) and 2^-20 where they do not: eight roundings, for every way of computing a long sum has an
order of its own, and plain JAX's may be a lucky one; the delta rule in chunks, by plain JAX too,
solves systems of 64 rows besides, and was found to need more than four on one CPU of two. For a
train_step the results are the loss and, per layer, the change of its parameters, weight and bias
together: the gradient of a bias alone may be zero in exact arithmetic (that of a key is), and has
no relative error then.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.case import Case, Problem
from bench.step import jitted_step
from bench.suites import SUITES, key

Results = dict[str, np.ndarray]


class CheckFailed(Exception):
    """A result is outside its error budget, or not finite."""


class Checker:
    """Judges cases, and remembers the references that several of them share."""

    def __init__(self) -> None:
        self._exact: dict[tuple, Results] = {}
        self._plain_errors: dict[tuple, dict[str, float]] = {}

    def check(self, case: Case, problem: Problem, outcome: Any) -> dict[str, str | float]:
        """Compares the outcome of one step from `problem.params` with the references.

        Returns:
            check_of, check_error, check_bound: the result nearest to its bound.

        Raises:
            CheckFailed: a result is outside its budget; NaN always is.
        """
        implementation = SUITES[case["suite"]].KEY
        group = key(case, without=(implementation, "dtype"))
        if group not in self._exact:
            self._exact[group] = _exact(case["op"], problem)
        exact = self._exact[group]
        group = key(case, without=(implementation,))
        if group not in self._plain_errors:
            plain = _run(case["op"], problem, problem.plain, problem.params, problem.inputs)
            self._plain_errors[group] = _errors(plain, exact)
        epsilon = _epsilon(case["dtype"], jax.default_backend())
        bounds = {name: 2 * e + epsilon for name, e in self._plain_errors[group].items()}
        return judge(_errors(_results(case["op"], problem.params, outcome), exact), bounds)


def judge(errors: dict[str, float], bounds: dict[str, float]) -> dict[str, str | float]:
    """The result nearest to its bound; raises CheckFailed if one is not within it."""
    for name, error in errors.items():
        if not error <= bounds[name]:  # so written, NaN fails
            raise CheckFailed(f"{name}: error {error:.3g} exceeds {bounds[name]:.3g}")
    worst = max(errors, key=lambda name: errors[name] / bounds[name])
    return {"check_of": worst, "check_error": errors[worst], "check_bound": bounds[worst]}


def _exact(op: str, problem: Problem) -> Results:
    with jax.enable_x64(True):
        params, inputs = jax.tree.map(
            lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            (problem.params, problem.inputs),
        )
        return _run(op, problem, problem.exact, params, inputs)


def _run(op: str, problem: Problem, model: Any, params: Any, inputs: Any) -> Results:
    step = jitted_step(model, op, problem.learning_rate)
    outcome = step(jax.tree.map(jnp.copy, params), *inputs)
    return _results(op, params, outcome)


def _results(op: str, params: Any, outcome: Any) -> Results:
    if op == "forward":
        return {"output": np.asarray(outcome).astype(np.float64)}
    loss, updated = outcome
    layers: dict[str, list[np.ndarray]] = {}
    before = jax.tree.leaves(params)
    for (path, after), old in zip(jax.tree.leaves_with_path(updated), before, strict=True):
        name = jax.tree_util.keystr(path[:-1], simple=True, separator=".")
        change = np.asarray(after).astype(np.float64) - np.asarray(old).astype(np.float64)
        layers.setdefault(name, []).append(change.ravel())
    changes = {name: np.concatenate(parts) for name, parts in layers.items()}
    return {"loss": np.asarray(loss).astype(np.float64), **changes}


def _errors(results: Results, exact: Results) -> dict[str, float]:
    return {name: _error(results[name], exact[name]) for name in exact}


def _error(result: np.ndarray, exact: np.ndarray) -> float:
    scale = np.abs(exact).max() or 1.0  # exact zeros: the error is absolute
    return float(np.abs(result - exact).max() / scale)


def _epsilon(dtype: str, platform: str) -> float:
    tf32 = dtype == "float32" and platform == "gpu"
    return {"float32": 2.0**-10 if tf32 else 2.0**-20, "bfloat16": 2.0**-7}[dtype]

"""One case -> one row: compile, check, time."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.case import Case, Problem
from bench.check import Checker, CheckFailed
from bench.step import jitted_step, next_params
from bench.suites import SUITES

SAMPLE_SECONDS = 0.05


def measure(case: Case, samples: int, checker: Checker) -> dict[str, Any]:
    """The row of a case. Whatever goes wrong is the row's `error`, and never a time."""
    suite = SUITES[case["suite"]]
    reason = suite.unavailable(case, jax.default_backend())
    if reason is not None:
        return {**case, "skipped": reason}
    row = dict(case)
    try:
        problem = suite.problem(case)
        row["params"] = sum(x.size for x in jax.tree.leaves(problem.params))
        return row | _checked_and_timed(case, problem, samples, checker)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"}


def _checked_and_timed(
    case: Case, problem: Problem, samples: int, checker: Checker
) -> dict[str, Any]:
    op = case["op"]
    step = jitted_step(problem.measured, op)
    params = jax.tree.map(jnp.copy, problem.params)  # donated by a train_step
    start = time.perf_counter()
    outcome = jax.block_until_ready(step(params, *problem.inputs))
    compile_s = time.perf_counter() - start
    check = checker.check(case, problem, outcome)
    path = _path(step.lower(problem.params, *problem.inputs).as_text())
    inner, samples_ms, outcome = _time(
        step, op, next_params(op, params, outcome), problem.inputs, samples
    )
    if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(outcome)):
        raise CheckFailed("a value is not finite after the timed calls")
    q1, median, q3 = np.percentile(samples_ms, (25, 50, 75)).tolist()
    return {
        "finite": True,
        "compile_s": compile_s,
        "inner": inner,
        "median_ms": median,
        "q1_ms": q1,
        "q3_ms": q3,
        "samples_ms": samples_ms,
        "path": path,
        **check,
    }


def _path(program: str) -> str:
    """What the lowered program really calls."""
    names = {"triton_kernel_call": "triton", "__cudnn": "cudnn"}
    return next((path for name, path in names.items() if name in program), "xla")


def _time(
    step: jax.stages.Wrapped, op: str, params: Any, inputs: tuple, samples: int
) -> tuple[int, list[float], Any]:
    """Calls per sample, the samples in milliseconds per call, and the last call's outcome."""
    outcome = None

    def sample(inner: int) -> float:
        nonlocal params, outcome
        start = time.perf_counter()
        for _ in range(inner):
            outcome = step(params, *inputs)
            params = next_params(op, params, outcome)
        jax.block_until_ready(outcome)
        return (time.perf_counter() - start) / inner

    inner = calls_per_sample(sample(1))
    if inner > 1:  # a single call includes the wait for it: ask again, of many
        inner = calls_per_sample(sample(inner))
    samples_ms = [1e3 * sample(inner) for _ in range(samples)]
    return inner, samples_ms, outcome


def calls_per_sample(seconds: float) -> int:
    """How many calls of that length make a sample of about 50 ms, at least one."""
    return max(1, round(SAMPLE_SECONDS / seconds))

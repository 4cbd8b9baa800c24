"""One case -> one row, and what becomes of a case that cannot be measured."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bench import measure as measure_module
from bench.check import Checker
from bench.measure import calls_per_sample, measure
from bench.suites import transformer

pytestmark = pytest.mark.usefixtures("two_blocks")

CASE = {
    "suite": "transformer",
    "attention": "tjk",
    "dtype": "float32",
    "tokens": 8,
    "batch": 1,
    "model_dim": 16,
    "op": "forward",
}
TIMES = {"compile_s", "inner", "median_ms", "q1_ms", "q3_ms", "samples_ms"}


def replaced(monkeypatch, **changes):
    """The suite with another model, parameters or inputs."""
    real = transformer.problem

    def problem(case):
        return dataclasses.replace(real(case), **changes)

    monkeypatch.setattr(transformer, "problem", problem)


def test_row_has_times_of_every_sample():
    row = measure(CASE, 5, Checker())
    assert row | CASE == row
    assert row["finite"] is True
    assert row["path"] == "xla"
    assert row["params"] == 2 * (12 * 16 * 16 + 13 * 16)
    assert row["compile_s"] > 0
    assert row["inner"] >= 1
    assert len(row["samples_ms"]) == 5
    assert min(row["samples_ms"]) > 0
    quartiles = np.percentile(row["samples_ms"], (25, 50, 75))
    assert [row["q1_ms"], row["median_ms"], row["q3_ms"]] == pytest.approx(quartiles.tolist())
    assert 0 <= row["check_error"] <= row["check_bound"]


def test_failing_case_is_a_row_with_its_error(monkeypatch):
    def fails(params, x):
        raise MemoryError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 24.72GiB")

    replaced(monkeypatch, measured=fails)
    row = measure(CASE, 2, Checker())
    reason = "MemoryError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 24.72GiB"
    assert row == {**CASE, "params": row["params"], "error": reason}


def test_case_without_a_model_is_a_row_with_its_error():
    row = measure({**CASE, "dtype": "float33"}, 2, Checker())
    assert row["error"].startswith("TypeError: ")
    assert not TIMES & row.keys()


def test_no_time_without_a_passing_check(monkeypatch):
    def wrong(params, x):
        return 2 * x

    replaced(monkeypatch, measured=wrong)
    monkeypatch.setattr(measure_module, "_time", lambda *_: pytest.fail("it was timed"))
    row = measure(CASE, 2, Checker())
    assert row["error"].startswith("CheckFailed: output: error ")
    assert not TIMES & row.keys()


def test_values_that_stop_being_finite_while_timed_fail(monkeypatch):
    not_finite = (1, [1.0], jnp.asarray([1.0, jnp.inf]))
    monkeypatch.setattr(measure_module, "_time", lambda *_: not_finite)
    row = measure(CASE, 2, Checker())
    assert row["error"] == "CheckFailed: a value is not finite after the timed calls"
    assert not TIMES & row.keys()


def test_cudnn_on_a_cpu_is_skipped(monkeypatch):
    case = {**CASE, "attention": "jax_cudnn", "dtype": "bfloat16"}
    row = measure(case, 2, Checker())
    assert row == {**case, "skipped": "cuDNN needs an NVIDIA GPU, the platform is cpu"}
    monkeypatch.setattr(transformer, "unavailable", lambda case, platform: None)
    row = measure(case, 2, Checker())
    # JAX says it in other words where its CUDA plugin is installed.
    assert row["error"].startswith("RuntimeError: cuDNN ")
    assert not TIMES & row.keys()


def test_path_is_what_the_program_calls():
    triton = "stablehlo.custom_call @triton_kernel_call(%0) {api_version = 2 : i32}"
    cudnn = "stablehlo.custom_call @__cudnn$fmhaSoftmax(%0)"
    assert measure_module._path(triton) == "triton"
    assert measure_module._path(triton.replace("call(", "call_ffi(")) == "triton"
    assert measure_module._path(cudnn) == "cudnn"
    assert measure_module._path("stablehlo.dot_general %0, %1") == "xla"


@pytest.mark.parametrize(
    ("seconds", "calls"), [(0.05, 1), (7.0, 1), (0.024, 2), (1e-3, 50), (0.6e-3, 83)]
)
def test_a_sample_lasts_about_50_ms(seconds, calls):
    assert calls_per_sample(seconds) == calls


@pytest.mark.parametrize(("op", "carried"), [("forward", False), ("train_step", True)])
def test_every_call_of_a_sample_is_timed_and_train_steps_are_chained(monkeypatch, op, carried):
    clock = iter(range(1000))
    monkeypatch.setattr(measure_module.time, "perf_counter", lambda: next(clock) * 0.01)
    given = []

    def step(params, x):
        given.append(params)
        return (x, params + 1) if op == "train_step" else x

    # The clock advances by 10 ms between its two readings in each sample, whatever runs between:
    # one call first seems to take 10 ms, so 5 of them are asked for, then 2 ms, so 25 are.
    inner, samples_ms, outcome = measure_module._time(step, op, 0, (jnp.ones(()),), 3)
    assert inner == 25
    assert samples_ms == pytest.approx([0.4] * 3)
    assert len(given) == 1 + 5 + 3 * 25
    assert given == (list(range(len(given))) if carried else [0] * len(given))
    assert (outcome[1] == len(given)) if carried else (outcome == 1)

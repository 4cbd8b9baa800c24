"""Cases -> rows, and what becomes of a case that cannot be measured."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bench import measure as measure_module
from bench.check import Checker
from bench.measure import Timed, calls_per_sample, measure
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


def row_of(case, samples=2):
    (row,) = measure([case], samples, Checker())
    return row


def test_row_has_times_of_every_sample():
    row = row_of(CASE, 5)
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
    params_and_x = 4 * (row["params"] + 8 * 16)
    assert row["peak_memory_bytes"] >= params_and_x + 4 * 8 * 16


def test_memory_that_is_not_reported_is_no_key():
    class Step:
        def memory_analysis(self):
            return None

    assert measure_module._memory(Step()) == {}


def test_donated_parameters_count_once():
    forward, train_step = (row_of({**CASE, "op": op}) for op in ("forward", "train_step"))
    twice = 2 * 4 * train_step["params"]
    assert train_step["peak_memory_bytes"] < forward["peak_memory_bytes"] + twice


def test_failing_case_is_a_row_with_its_error(monkeypatch):
    def fails(params, x):
        raise MemoryError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 24.72GiB")

    replaced(monkeypatch, measured=fails)
    row = row_of(CASE)
    reason = "MemoryError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 24.72GiB"
    assert row == {**CASE, "params": row["params"], "error": reason}


def test_case_without_a_model_is_a_row_with_its_error():
    row = row_of({**CASE, "dtype": "float33"})
    assert row["error"].startswith("TypeError: ")
    assert not TIMES & row.keys()


def test_no_time_without_a_passing_check(monkeypatch):
    def wrong(params, x):
        return 2 * x

    replaced(monkeypatch, measured=wrong)
    monkeypatch.setattr(Timed, "call", lambda self: pytest.fail("it was timed"))
    row = row_of(CASE)
    assert row["error"].startswith("CheckFailed: output: error ")
    assert not TIMES & row.keys()


def test_values_that_stop_being_finite_while_timed_fail(monkeypatch):
    def call(self):
        self.outcome = jnp.asarray([1.0, jnp.inf])
        return 0.1

    monkeypatch.setattr(Timed, "call", call)
    row = row_of(CASE)
    assert row["error"] == "CheckFailed: a value is not finite after the timed calls"
    assert not TIMES & row.keys()


def test_implementations_take_turns_and_one_that_fails_leaves_them(monkeypatch):
    called = []

    def call(self):
        name = self.measured["attention"]
        called.append(name)
        if called.count(name) == 3 and name == "jax_xla":
            raise MemoryError("gone")
        return 0.05 * len(called)  # one call a sample

    monkeypatch.setattr(Timed, "call", call)
    names = ("tjk", "jax_xla", "tjk_flex")
    cases = [{**CASE, "attention": name} for name in names]
    rows = measure(cases, 3, Checker())
    assert [row["attention"] for row in rows] == list(names)
    # Once each to see how many calls make a sample; jax_xla fails in the second round.
    assert called == [*names, *names, *names, "tjk", "tjk_flex"]
    assert rows[1] == {**cases[1], "params": rows[1]["params"], "error": "MemoryError: gone"}
    assert rows[0]["samples_ms"] == pytest.approx([200.0, 350.0, 500.0])
    assert rows[2]["samples_ms"] == pytest.approx([300.0, 450.0, 550.0])


def test_cudnn_on_a_cpu_is_skipped(monkeypatch):
    case = {**CASE, "attention": "jax_cudnn", "dtype": "bfloat16"}
    row = row_of(case)
    assert row == {**case, "skipped": "cuDNN needs an NVIDIA GPU, the platform is cpu"}
    monkeypatch.setattr(transformer, "unavailable", lambda case, platform: None)
    row = row_of(case)
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

    timed = Timed({"op": op}, step, 0, (jnp.ones(()),), None, compile_s=0.0, facts={})
    # The clock advances by 10 ms between its two readings in each sample, whatever runs between:
    # one call first seems to take 10 ms, so 5 of them are asked for, then 2 ms, so 25 are.
    timed.choose_inner()
    assert timed.inner == 25
    assert [timed.call() for _ in range(3)] == pytest.approx([0.4e-3] * 3)
    assert len(given) == 1 + 5 + 3 * 25
    assert given == (list(range(len(given))) if carried else [0] * len(given))
    assert (timed.outcome[1] == len(given)) if carried else (timed.outcome == 1)

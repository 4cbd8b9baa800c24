"""Rows that were not measured, for the tests of everything around the measuring."""

import functools

import jax
import pytest

import bench.__main__
from bench.suites import transformer


@pytest.fixture(autouse=True)
def standard_promotion():
    """The benchmark measures JAX's own attention, which promotes dtypes implicitly."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def two_blocks(monkeypatch):
    """Half the suite's blocks, for half the time that compiling takes."""
    config = functools.partial(transformer.transformer.Config, blocks=2)
    monkeypatch.setattr(transformer.transformer, "Config", config)


def row_of(case, median=2.0):
    """A complete row for a case, as if measured."""
    return {
        **case,
        "params": 10,
        "finite": True,
        "compile_s": 0.5,
        "inner": 3,
        "median_ms": median,
        "q1_ms": 0.99 * median,
        "q3_ms": 1.01 * median,
        "samples_ms": [0.99 * median, median, 1.01 * median],
        "path": "xla",
        "peak_memory_bytes": 1000,
        "check_of": "output",
        "check_error": 1e-7,
        "check_bound": 1e-6,
    }


@pytest.fixture
def make_row():
    return row_of


@pytest.fixture
def measured(monkeypatch):
    """Replaces the measuring; the list fills with the (case, samples) that were asked for."""
    asked = []

    def measure(cases, samples, checker):
        asked.extend((case, samples) for case in cases)
        return [row_of(case) for case in cases]

    monkeypatch.setattr(bench.__main__, "measure", measure)
    return asked

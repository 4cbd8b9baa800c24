"""Where the tests run: natively on a GPU, else in Triton's interpreter."""

import concurrent.futures
import gc
import multiprocessing
import os
from collections.abc import Iterator
from unittest import mock

import jax
import pytest

ON_GPU = jax.default_backend() == "gpu"
if not ON_GPU and multiprocessing.parent_process() is None:  # that is, not for `native`
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, that is later

    # XLA's optimisations are not what is tested, and take half of the time.
    jax.config.update("jax_disable_most_optimizations", True)

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True, scope="module")
def few_mappings() -> Iterator[None]:
    """XLA maps what it compiles into memory, about 50 mappings a test on a CPU.

    A process may have 65530 on Linux, and XLA crashes where it gets no more (jaxlib 0.10.2).
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(params=["xla", "triton"], scope="session")
def implementation(request: pytest.FixtureRequest) -> str:
    """One test body for every implementation."""
    return request.param


@pytest.fixture(scope="session")
def native() -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """A process in which Triton compiles: `native.submit(function, *arguments).result()`.

    Interpreter and compiler exclude each other in a process. The function must be one of a module.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    context = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, environment, clear=True):
        pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
        pool.submit(os.getpid).result()  # the process starts now, in this environment
    with pool:
        yield pool

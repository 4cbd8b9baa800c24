"""Lowers a launch for a GPU through jax-triton. All that differs between its versions stands here.

jax-triton 0.3 (JAX 0.10) and 0.4 (JAX 0.11) name arguments differently, type scalars differently,
and 0.3 sets TRITON_CACHE_DIR="" when imported, after which Triton cannot compile in that process.
"""

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from tjk.executors.architectures import backend_options
from tjk.launch import Arch, Launch


def lower(ctx: mlir.LoweringRuleContext, *inputs: Any, launch: Launch) -> Any:
    """The lowering rule of a launch for CUDA and ROCm."""
    with _compiler_options(launch.arch):
        return mlir.lower_fun(_call, multiple_results=True)(ctx, *inputs, launch=launch)


@functools.cache
def _import() -> ModuleType:
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    except ImportError as error:
        raise ImportError(
            "Triton kernels on a GPU need jax-triton and JAX's GPU plugin: install tjk[cuda13] or "
            "tjk[cuda12]"
        ) from error
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton


def _has_options() -> bool:
    """Whether `triton_call` takes the compiler's options: since jax-triton 0.4."""
    return "backend_options" in inspect.signature(_import().triton_call).parameters


def _call(*inputs: jax.Array, launch: Launch) -> tuple[jax.Array, ...]:
    cuda = isinstance(launch.arch, int)
    arguments: dict[str, Any] = {
        "kernel": launch.kernel,
        "grid": launch.grid,
        "name": launch.name,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "compute_capability": launch.arch if cuda else 0,  # not used for AMD, nor looked up
        "zeroed_outputs": launch.zeroed,
        **dict(launch.constexprs),
    }
    if _has_options():
        arguments["out_type"] = launch.outputs
        arguments["backend_options"] = backend_options(launch.arch)
        arguments["cost_estimate"] = {"flops": launch.flops, "bytes_accessed": launch.bytes}
        scalars = launch.scalars
    else:
        arguments["out_shape"] = launch.outputs
        # 0.3 types a Python float as float64.
        scalars = tuple(np.float32(x) if isinstance(x, float) else x for x in launch.scalars)
    with warnings.catch_warnings():
        # 0.4 prefers a reference to a buffer of zeros, which a lowering rule cannot make; this
        # zeroes the buffer itself, with a memset before the launch.
        warnings.filterwarnings("ignore", "zeroed_outputs", DeprecationWarning)
        return tuple(_import().triton_call(*inputs, *scalars, **arguments))


@contextlib.contextmanager
def _compiler_options(arch: Arch | None) -> Iterator[None]:
    """Tells Triton's backends, while a launch is lowered, what jax-triton does not pass on.

    0.3 has no argument for the options of the CUDA backend. For AMD both take the architecture of
    the card that is present and ignore another one, and pass Triton 3.9 no `num_ctas`, without
    which it fails.
    """
    with contextlib.ExitStack() as replaced:
        if isinstance(arch, str):
            from triton.backends.amd.compiler import HIPBackend

            library = _import().triton_lib.triton_kernel_call_lib
            replaced.enter_context(_replace(library, "get_arch_details", lambda device: arch))
            make = HIPBackend.make_ttir

            def make_ttir(module: Any, metadata: dict[str, Any], *rest: Any) -> Any:
                metadata.setdefault("num_ctas", 1)
                return make(module, metadata, *rest)

            replaced.enter_context(_replace(HIPBackend, "make_ttir", staticmethod(make_ttir)))
        elif not _has_options():
            from triton.backends.nvidia.compiler import CUDABackend

            parse = CUDABackend.parse_options

            def parse_options(self: Any, given: dict[str, Any]) -> Any:
                return parse(self, backend_options(arch) | given)

            replaced.enter_context(_replace(CUDABackend, "parse_options", parse_options))
        yield


@contextlib.contextmanager
def _replace(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

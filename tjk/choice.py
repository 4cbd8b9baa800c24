"""Which implementation runs: decided when a program is lowered, not when it is traced."""

import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import jax

from tjk import executors
from tjk.checks import fail_value

Implementation = Literal["triton", "xla"] | None


def check_implementation(op: str, implementation: object) -> None:
    """Raises ValueError unless the argument names an implementation that can exist here."""
    if implementation not in (None, "triton", "xla"):
        fail_value(op, "implementation must be None, 'triton' or 'xla'", repr(implementation))
    if implementation == "triton" and not _has_triton():
        raise ValueError(f"{op}: implementation='triton' needs the package triton (Linux only)")


def dispatch(
    implementation: Implementation,
    triton: Callable[..., Any],
    xla: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Calls one of two functions of the same operands and results.

    None takes Triton on CUDA (compute capability 8.0 and newer) and ROCm, and XLA elsewhere; both
    are traced, and the platform is chosen when the program is lowered. A name takes what it names.
    """
    if implementation == "triton":
        return triton(*operands)
    if implementation == "xla" or not _has_triton() or _too_old():
        return xla(*operands)
    return jax.lax.platform_dependent(*operands, cuda=triton, rocm=triton, default=xla)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _too_old() -> bool:
    arch = executors.architecture()
    return isinstance(arch, int) and arch < 80

"""Functions of scalars, traced from JAX, that are evaluated in JAX or written in Triton.

A kernel cannot call a JAX function. `trace` turns one into a `Program`, `derivative` makes the
program of its gradients, `evaluate` runs either on arrays, and `source` writes it as a Triton
function of tiles.
"""

from tjk.elementwise.derivative import Derivative, derivative
from tjk.elementwise.evaluate import clamped, evaluate
from tjk.elementwise.program import Program
from tjk.elementwise.source import HEADER, offset, source
from tjk.elementwise.trace import trace

__all__ = [
    "HEADER",
    "Derivative",
    "Program",
    "clamped",
    "derivative",
    "evaluate",
    "offset",
    "source",
    "trace",
]

"""What one row measures, the options that select rows, and the model behind a row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array

OPS = ("forward", "train_step")
DTYPES = ("float32", "bfloat16")

# The keys of a row that say what is measured, in the row's order: suite, ..., op.
Case = dict[str, Any]
Model = Callable[..., Array]  # (params, *inputs) -> output


@dataclass(frozen=True)
class Selection:
    """What the command line asks for; an empty tuple leaves the choice to the suite."""

    full: bool
    dtypes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    resolutions: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    model_dim: tuple[int, ...] = ()
    cells: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()

    def takes(self, dtype: str, op: str) -> bool:
        """Whether to run it: where no dtype is asked for, the quick matrix trains in float32 alone.

        CPUs emulate bfloat16, and a train_step takes longest to compile and to check.
        """
        return self.full or bool(self.dtypes) or (dtype, op) != ("bfloat16", "train_step")


@dataclass(frozen=True)
class Problem:
    """A model with its parameters and inputs, and the two computations that judge it.

    Attributes:
        params: nested dict of float32 arrays.
        inputs: arrays in the case's dtype. Their values do not depend on the dtype, so that cases
            which differ only in dtype share one exact result.
        measured: the model in the case's dtype and implementation.
        plain: the same model in the same dtype, in plain JAX.
        exact: the same model by its definition, to be run on float64 copies.
        learning_rate: of the train_step's gradient descent, which must not diverge.
    """

    params: Any
    inputs: tuple[Array, ...]
    measured: Model
    plain: Model
    exact: Model
    learning_rate: float = 1e-2

"""One launch of a Triton kernel, described once, as data.

An op's `triton.py` builds `Launch` values; `tjk.executors.run` executes them on a GPU or in the
interpreter, `tjk.executors.compiler` turns the same values into machine code without a GPU.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

# A CUDA compute capability without its dot (86 for 8.6), or an AMD name ("gfx942").
Arch = int | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel and everything that one call of it needs.

    The kernel's parameters are, in this order: a pointer for each of `inputs`, the `scalars`, a
    pointer for each of `outputs`, then the constexprs, which are passed by name.

    Attributes:
        kernel: a function decorated with `triton.jit`.
        inputs: arrays (tracers while a program is traced, `jax.ShapeDtypeStruct` once recorded).
        scalars: int for i32 (u32 and i64 beyond its range), float for fp32. They are run-time
            arguments: another value needs no other compilation (Triton specialises on a 1).
        outputs: shape and dtype of each output.
        grid: number of programs along each of at most three axes. With a zero in it nothing is
            launched.
        constexprs: compile-time arguments by name; stored as sorted pairs, so a launch is hashable.
        num_warps: warps (of 32 threads; on AMD wavefronts of 64) in a program.
        num_stages: depth of the software pipeline of a loop.
        zeroed: indices of the outputs that must hold zeros when the kernel starts.
        batched: every input and output has the batch as its leading axis, and the grid's first
            axis is a multiple of the batch with the batch varying slowest, so that `jax.vmap` can
            fold its axis into the batch.
        flops: floating-point operations of matrix products, tile padding counted.
        bytes: bytes that must cross device memory: each input and output once.
        arch: what the tiles were chosen for; None where neither a GPU nor `tjk.executors.target`
            named an architecture.
    """

    kernel: Any
    inputs: tuple[Any, ...]
    scalars: tuple[int | float, ...] = ()
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    constexprs: Any = ()
    num_warps: int = 4
    num_stages: int = 2
    zeroed: tuple[int, ...] = ()
    batched: bool = False
    flops: int = 0
    bytes: int = 0
    arch: Arch | None = None

    def __post_init__(self) -> None:
        if isinstance(self.constexprs, Mapping):
            object.__setattr__(self, "constexprs", tuple(sorted(self.constexprs.items())))

    @property
    def name(self) -> str:
        """The kernel's function name."""
        return self.kernel.__name__

    def abstract(self) -> "Launch":
        """The same launch with shapes in place of arrays: hashable, and free of tracers."""
        structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs)
        return dataclasses.replace(self, inputs=structs)

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """Pairs of parameter name and what is passed for it, constexprs left out."""
        passed = (*self.inputs, *self.scalars, *self.outputs)
        names = [name for name in self.kernel.arg_names if name not in dict(self.constexprs)]
        return zip(names, passed, strict=True)


class _Recorder(list):
    """A list that is hashable by identity, so that JAX can keep it in its trace-cache keys."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


# Part of JAX's trace-cache key: a function traced earlier is traced again inside `recording`.
_recorder = jax.make_user_context(None)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collects the launches of whatever is traced inside, in order, without running anything.

    Example:
        >>> with recording() as launches:                     # doctest: +SKIP
        ...     jax.eval_shape(function, *shapes)
    """
    records = _Recorder()
    with _recorder(records):
        yield records


def record(launch: Launch) -> None:
    """Notes a traced launch in the innermost `recording`, if there is one."""
    if (records := _recorder.value) is not None:
        records.append(launch.abstract())


def recorded() -> int:
    """How many launches the innermost `recording` holds; 0 outside of one."""
    return len(_recorder.value or ())

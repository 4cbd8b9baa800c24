"""Executes launches: `run` binds a JAX primitive whose lowering rules are the executors.

CUDA and ROCm lower to jax-triton (`jax_triton.py`), the CPU to Triton's interpreter
(`interpreter.py`), and `jax.vmap` folds into the batch. Tracing needs neither jax-triton nor a GPU.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from tjk import launch as _launch
from tjk.executors.architectures import MULTIPROCESSORS
from tjk.launch import Arch, Launch
from tjk.manual_axes import vary_together

# Part of JAX's trace-cache key, because tiles are chosen for it while tracing.
_target = jax.make_user_context(None)


@contextlib.contextmanager
def target(arch: Arch) -> Iterator[None]:
    """Chooses tiles and lowers for `arch` inside, whatever card is present.

    Args:
        arch: a CUDA compute capability without its dot (86 for 8.6) or an AMD name ("gfx942").

    Example:
        >>> with target(86):                                  # doctest: +SKIP
        ...     jax.jit(f).trace(*structs).lower(lowering_platforms=("cuda",))
    """
    if not (isinstance(arch, int) and arch >= 80) and not str(arch).startswith("gfx"):
        raise ValueError(
            "target: arch must be a compute capability of at least 80 (86 means 8.6) or an AMD "
            f"name such as 'gfx942', got {arch!r}"
        )
    with _target(arch):
        yield


def architecture() -> Arch | None:
    """The `target` in force, else the present GPU's architecture, else None."""
    if _target.value is not None:
        return _target.value
    try:
        capability = str(jax.devices("gpu")[0].compute_capability)
    except RuntimeError:  # JAX's answer where no GPU backend exists
        return None
    return capability.split(":")[0] if "gfx" in capability else int(capability.replace(".", ""))


def multiprocessors() -> int:
    """Of the present GPU, unless `target` is in force; else of a large card of the architecture."""
    arch = architecture()
    if _target.value is None and arch is not None:
        return jax.devices("gpu")[0].core_count
    return MULTIPROCESSORS.get(arch, max(MULTIPROCESSORS.values()))


def run(launch: Launch) -> tuple[jax.Array, ...]:
    """Executes a launch and returns its outputs; works under jit and vmap, not under grad.

    Raises:
        ValueError: for a grid that no GPU takes; when lowered for a CPU without the interpreter,
            or for a GPU whose architecture nobody named.
    """
    if math.prod(launch.grid) == 0:
        return tuple(jnp.zeros(out.shape, out.dtype) for out in launch.outputs)
    if len(launch.grid) > 3 or launch.grid[0] >= 2**31 or max(launch.grid[1:], default=1) >= 2**16:
        raise ValueError(
            f"{launch.name}: grid must have at most three axes, the first below 2^31 and the "
            f"others below 2^16, got {launch.grid}"
        )
    known = _launch.recorded()
    outputs = _launch_p.bind(*vary_together(*launch.inputs), launch=launch.abstract())
    if _launch.recorded() == known:  # else the batching rule has run, and noted, another launch
        _launch.record(launch)
    return tuple(outputs)


_launch_p = Primitive("triton_launch")
_launch_p.multiple_results = True
_launch_p.def_impl(lambda *inputs, launch: xla.apply_primitive(_launch_p, *inputs, launch=launch))


@_launch_p.def_abstract_eval
def _abstract_eval(*inputs: jax.core.ShapedArray, launch: Launch) -> list[jax.core.ShapedArray]:
    return [_output(jax.core.ShapedArray(x.shape, x.dtype), inputs) for x in launch.outputs]


def _output(
    output: jax.core.ShapedArray, inputs: Sequence[jax.core.ShapedArray]
) -> jax.core.ShapedArray:
    """Inside `jax.shard_map` an output varies over the mesh as the inputs do."""
    if not inputs or not inputs[0].manual_axis_type.varying:
        return output
    spec = jax.P(*[None] * output.ndim)
    return output.update(
        sharding=inputs[0].sharding.update(spec=spec), manual_axis_type=inputs[0].manual_axis_type
    )


def _batch(
    inputs: Sequence[jax.Array], axes: Sequence[int | None], *, launch: Launch
) -> tuple[list[jax.Array], list[int]]:
    """Folds the mapped axis into the batch; where that would copy too much, loops instead.

    Inputs that are not mapped must be repeated to fold. That is accepted while the copies weigh no
    more than what the launch moves anyway.
    """
    mapped = [i for i, axis in enumerate(axes) if axis is not None]
    inputs = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(inputs, axes)]
    size = inputs[mapped[0]].shape[0]
    copied = sum(x.nbytes * (size - 1) for x, axis in zip(inputs, axes) if axis is None)
    if launch.batched and copied <= size * launch.bytes:
        full = [
            x if axis is not None else jnp.broadcast_to(x, (size, *x.shape))
            for x, axis in zip(inputs, axes)
        ]
        folded = dataclasses.replace(
            launch,
            inputs=tuple(x.reshape(size * x.shape[1], *x.shape[2:]) for x in full),
            outputs=tuple(
                jax.ShapeDtypeStruct((size * out.shape[0], *out.shape[1:]), out.dtype)
                for out in launch.outputs
            ),
            grid=(size * launch.grid[0], *launch.grid[1:]),
            flops=size * launch.flops,
            bytes=size * launch.bytes,
        )
        outputs = run(folded)
        outputs = [x.reshape(size, *out.shape) for x, out in zip(outputs, launch.outputs)]
    else:

        def one(slices: list[jax.Array]) -> tuple[jax.Array, ...]:
            merged = list(inputs)
            for i, x in zip(mapped, slices):
                merged[i] = x
            return run(dataclasses.replace(launch, inputs=tuple(merged)))

        outputs = list(jax.lax.map(one, [inputs[i] for i in mapped]))
    return outputs, [0] * len(outputs)


batching.primitive_batchers[_launch_p] = _batch


def _on_gpu(ctx: mlir.LoweringRuleContext, *inputs: Any, launch: Launch) -> Any:
    if launch.arch is None:
        raise ValueError(
            f"{launch.name}: no GPU is present, so name the architecture to lower for where the "
            "function is traced: `with tjk.executors.target(86):`"
        )
    from tjk.executors import jax_triton

    return jax_triton.lower(ctx, *inputs, launch=launch)


def _on_cpu(ctx: mlir.LoweringRuleContext, *inputs: Any, launch: Launch) -> Any:
    if hasattr(launch.kernel, "rewrite"):  # decorated under TRITON_INTERPRET=1
        from tjk.executors import interpreter

        return mlir.lower_fun(interpreter.call, multiple_results=True)(ctx, *inputs, launch=launch)
    if len(ctx.module_context.platforms) == 1:
        raise ValueError(
            f"{launch.name}: Triton runs on a CPU only in its interpreter, and TRITON_INTERPRET=1 "
            "must be set before Triton is imported; or use implementation='xla'"
        )
    # An export for several platforms lowers both branches of `jax.lax.platform_dependent` for all
    # of them. This one is never reached on a CPU; XLA refuses to compile it if it ever should be.
    return jax.ffi.ffi_lowering("tjk_triton_needs_a_gpu")(ctx, *inputs)


mlir.register_lowering(_launch_p, _on_gpu, platform="cuda")
mlir.register_lowering(_launch_p, _on_gpu, platform="rocm")
mlir.register_lowering(_launch_p, _on_cpu, platform="cpu")

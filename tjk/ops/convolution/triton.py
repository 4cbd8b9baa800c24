"""Launches of the convolution's kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import convolution as kernels
from tjk import executors
from tjk.launch import Launch
from tjk.ops.convolution.operands import Operands

# Times and channels of a forward program: 16 elements a thread.
_BLOCK_T, _BLOCK_D = 16, 128
# A backward program has four elements a thread, and goes through so many steps, so many at a time.
_ELEMENTS = 512
_STEPS, _ROUND = 32, 4


def forward(operands: Operands, *, activation: str | None, reverse: bool) -> Array:
    """y (B, L, D)."""
    (y,) = executors.run(forward_launch(operands, activation=activation, reverse=reverse))
    return y


def backward(
    operands: Operands, d_y: Array, *, activation: str | None, reverse: bool
) -> tuple[Array, Array, Array | None]:
    """The gradients of x, weight and bias, in their dtypes."""
    launch = backward_launch(operands, d_y, activation=activation, reverse=reverse)
    d_x, d_weight, d_bias = executors.run(launch)
    d_weight = jnp.sum(d_weight, (0, 1)).T.astype(operands.weight.dtype)
    if operands.bias is None:
        return d_x, d_weight, None
    return d_x, d_weight, jnp.sum(d_bias, (0, 1)).astype(operands.bias.dtype)


def forward_launch(operands: Operands, *, activation: str | None, reverse: bool) -> Launch:
    """The launch that makes y."""
    L = operands.x.shape[1]
    return _launch(
        operands,
        (),
        -(-L // _BLOCK_T),
        {
            **{"ACTIVATION": activation, "REVERSE": reverse},
            **{"BLOCK_T": _BLOCK_T, "BLOCK_D": _BLOCK_D},
        },
        kernel=kernels.convolution_forward,
        scalars=(L,),
        outputs=(jax.ShapeDtypeStruct(operands.x.shape, operands.x.dtype),),
    )


def backward_launch(
    operands: Operands, d_y: Array, *, activation: str | None, reverse: bool
) -> Launch:
    """The launch that makes d_x and, a row for each part of time, d_weight and d_bias."""
    (B, L, D), width = operands.x.shape, operands.weight.shape[1]
    block_d = 128 if D > 64 else 64 if D > 32 else 32
    rows, ahead = _ELEMENTS // block_d, width - 1
    length = min(_STEPS, _ROUND * -(-(L + ahead) // _ROUND)) - ahead
    parts = -(-L // (rows * length))
    return _launch(
        operands,
        (d_y,),
        parts,
        {
            **{"ACTIVATION": activation, "REVERSE": reverse},
            **{"ROWS": rows, "BLOCK_D": block_d, "STEPS": _ROUND},
        },
        kernel=kernels.convolution_backward,
        scalars=(L, parts, length),
        outputs=(
            jax.ShapeDtypeStruct(operands.x.shape, operands.x.dtype),
            jax.ShapeDtypeStruct((B, parts, width, D), jnp.float32),
            jax.ShapeDtypeStruct((B, parts if operands.bias is not None else 0, D), jnp.float32),
        ),
    )


def _launch(
    operands: Operands,
    more: tuple[Array, ...],
    parts: int,
    constexprs: dict[str, Any],
    **launch: Any,
) -> Launch:
    """What both launches have in common; a program takes a part of time and BLOCK_D channels."""
    x, weight, bias, initial_state, runs = operands
    B, _, D = x.shape
    # What is left out is some array that is not read.
    inputs = (x, weight, *(x if a is None else a for a in (bias, initial_state, runs)), *more)
    moved = (a for a in (*operands, *more, *launch["outputs"]) if a is not None)
    return Launch(
        inputs=inputs,
        grid=(B * parts * -(-D // constexprs["BLOCK_D"]),),
        constexprs={
            "D": D,
            "W": weight.shape[1],
            "HAS_BIAS": bias is not None,
            "HAS_INITIAL": initial_state is not None,
            "HAS_RUNS": runs is not None,
            **constexprs,
        },
        num_warps=4,
        bytes=sum(a.size * a.dtype.itemsize for a in moved),
        arch=executors.architecture(),
        **launch,
    )

"""The rule of differentiation of attention: all of its public functions end here."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from tjk import choice
from tjk.manual_axes import vary_together
from tjk.ops.attention import xla
from tjk.ops.attention.operands import Operands, Options
from tjk.precision import accumulator


def attend(operands: Operands, options: Options) -> tuple[Array, Array]:
    """Output (B, T, N, V) and logsumexp (B, T, N)."""
    leaves, structure = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(structure, vary_together(*leaves))
    output, logsumexp = _attention(operands, options)
    return output, jnp.moveaxis(logsumexp, 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(operands: Operands, options: Options) -> tuple[Array, Array]:
    """Output (B, T, N, V) and logsumexp (B, N, T)."""
    return _forward(operands, options)[0]


def _forward(operands: Operands, options: Options) -> tuple[tuple[Array, Array], Any]:
    output, logsumexp = _call("forward", options, operands)
    output = checkpoint_name(output, "flash_attention_output")
    logsumexp = checkpoint_name(logsumexp, "flash_attention_logsumexp")
    return (output, logsumexp), (operands, output, logsumexp)


def _backward(options: Options, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Operands]:
    operands, output, logsumexp = residuals
    d_output, d_logsumexp = cotangents
    exact = accumulator(output.dtype)
    product = output.astype(exact) * d_output.astype(exact)
    delta = jnp.moveaxis(product.sum(-1), -1, 1) - d_logsumexp.astype(exact)
    gradients = _call("backward", options, operands, logsumexp, delta, d_output)
    if operands.sinks is not None:
        weight = jnp.exp(operands.sinks[:, None].astype(exact) - logsumexp)
        d_sinks = jnp.where(logsumexp == -jnp.inf, 0, -weight * delta).sum((0, 2))
        gradients = gradients._replace(sinks=d_sinks.astype(operands.sinks.dtype))
    return (gradients,)


_attention.defvjp(_forward, _backward)


def _call(direction: Literal["forward", "backward"], options: Options, *arguments: Any) -> Any:
    """Calls the chosen implementation's function of that name."""

    def triton(*arguments: Any) -> Any:
        from tjk.ops.attention import triton  # needs the package triton, which Linux alone has

        return getattr(triton, direction)(*arguments, options)

    def plain(*arguments: Any) -> Any:
        return getattr(xla, direction)(*arguments, options)

    return choice.dispatch(options.implementation, triton, plain, *arguments)

"""Programs on arrays that broadcast against one another, in plain JAX."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from tjk.elementwise.program import Instruction, Literal, Program

UNARY = {
    **{"abs": lax.abs, "ceil": lax.ceil, "cos": lax.cos, "erf": lax.erf, "exp": lax.exp},
    **{"exp2": lax.exp2, "expm1": lax.expm1, "floor": lax.floor, "is_finite": lax.is_finite},
    **{"log": lax.log, "log1p": lax.log1p, "logistic": lax.logistic, "neg": lax.neg},
    **{"log2": jnp.log2, "stop_gradient": lax.stop_gradient},  # log2 is a primitive from jax 0.11
    **{"not": lax.bitwise_not, "rsqrt": lax.rsqrt, "sign": lax.sign, "sin": lax.sin},
    **{"sqrt": lax.sqrt, "square": lax.square, "tanh": lax.tanh},
}
BINARY = {
    **{"add": lax.add, "and": lax.bitwise_and, "div": lax.div, "eq": lax.eq, "ge": lax.ge},
    **{"gt": lax.gt, "le": lax.le, "lt": lax.lt, "max": lax.max, "min": lax.min, "mul": lax.mul},
    **{"ne": lax.ne, "or": lax.bitwise_or, "pow": lax.pow, "rem": lax.rem, "sub": lax.sub},
    **{"xor": lax.bitwise_xor, "shift_left": lax.shift_left},
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical,
}
OTHER = (
    "bitcast_convert_type",
    "clamp",
    "convert_element_type",
    "integer_pow",
    "round",
    "select_n",
)
SUPPORTED = tuple(sorted((*UNARY, *BINARY, *OTHER)))


def evaluate(
    program: Program,
    values: Sequence[Array],
    arrays: Sequence[Array],
    reads: Mapping[int, Array] | None = None,
) -> Array | tuple[Array, ...]:
    """The program's output, or a tuple of several; differentiable by JAX.

    Args:
        program: what to compute.
        values: of the inputs, which broadcast.
        arrays: what the program reads.
        reads: of some of the reads, by number, what they have read.
    """
    known: dict[int, Array] = dict(enumerate(values))

    def value(operand: int | Literal) -> Array:
        if isinstance(operand, Literal):
            return jnp.asarray(operand.value, operand.dtype)
        return known[operand]

    for number, instruction in program.numbered():
        if reads and number in reads:
            known[number] = reads[number]
        else:
            known[number] = _apply(instruction, [value(x) for x in instruction.operands], arrays)
    outputs = tuple(value(x) for x in program.outputs)
    return outputs[0] if len(outputs) == 1 else outputs


def clamped(indices: Sequence[Array], shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Indices inside of an array: negative ones are 0, they do not count from the end."""
    return tuple(
        jnp.clip(i, jnp.zeros_like(i), jnp.full_like(i, size - 1))
        for i, size in zip(indices, shape)
    )


def _apply(instruction: Instruction, operands: list[Array], arrays: Sequence[Array]) -> Array:
    op, params = instruction.op, instruction.params
    if op == "read":
        x = arrays[params[0]]
        if not operands:
            return x
        return x.at[clamped(operands, x.shape)].get(mode="promise_in_bounds")
    if op in UNARY:
        return UNARY[op](*operands)
    if op == "convert_element_type":
        return operands[0].astype(instruction.dtype)
    if op == "bitcast_convert_type":
        return lax.bitcast_convert_type(operands[0], jnp.dtype(instruction.dtype))
    if op == "integer_pow":
        return lax.integer_pow(operands[0], *params)
    if op == "round":
        return lax.round(operands[0], lax.RoundingMethod(*params))
    operands = jnp.broadcast_arrays(*operands)
    if op == "clamp":
        return lax.clamp(*operands)
    if op == "select_n":
        return lax.select_n(*operands)
    if op == "custom_gradient":
        return _with_gradient(params[0], *operands)
    return BINARY[op](*operands)


def _with_gradient(rule: Program, value: Array, *operands: Array) -> Array:
    """A value of which `rule` says the gradients with respect to the operands, all of one shape."""

    @jax.custom_vjp
    def result(value: Array, *operands: Array) -> Array:
        return value

    def backward(operands: tuple[Array, ...], d: Array) -> tuple[Array | None, ...]:
        outputs = evaluate(rule, (*operands, d), ())
        gradients = iter(outputs if isinstance(outputs, tuple) else (outputs,))
        return None, *(
            jnp.broadcast_to(next(gradients), d.shape)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else None
            for x in operands
        )

    result.defvjp(lambda value, *operands: (value, operands), backward)
    return result(value, *operands)

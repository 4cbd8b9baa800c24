"""A program as the text of a Triton function."""

import math

from tjk.elementwise.program import Instruction, Literal, Operand, Program

# What the text imports.
HEADER = """\
import triton
import triton.language as tl

from kernels_triton import elementwise
"""

# sin and cos compile to code with float64 instructions on NVIDIA's cards.
_TEMPLATES = {
    **{"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "neg": "-{0}"},
    **{"eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}"},
    **{"gt": "{0} > {1}", "ge": "{0} >= {1}", "square": "{0} * {0}", "rem": "{0} % {1}"},
    **{"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}"},
    **{"shift_left": "{0} << {1}", "select_n": "tl.where({0}, {2}, {1})", "abs": "tl.abs({0})"},
    **{"shift_right_arithmetic": "{0} >> {1}", "log2": "tl.log2({0})"},
    **{"exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "sin": "tl.sin({0})"},
    **{"cos": "tl.cos({0})", "erf": "tl.erf({0})", "sqrt": "tl.sqrt_rn({0})"},
    **{"rsqrt": "tl.rsqrt({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})"},
    **{"tanh": "elementwise.tanh({0})", "logistic": "elementwise.logistic({0})"},
    **{"log1p": "elementwise.log1p({0})", "expm1": "elementwise.expm1({0})"},
    **{"sign": "elementwise.sign({0})", "pow": "elementwise.power({0}, {1})"},
    "is_finite": 'tl.abs({0}) < float("inf")',
}
_NAN = "propagate_nan=tl.PropagateNan.ALL"
# Operations that matter to gradients alone.
_SAME = ("custom_gradient", "stop_gradient")
_ROUND = ("elementwise.round_away({0})", "elementwise.round_even({0})")
_HALF = ("bfloat16", "float16")
_TYPES = {"bool": "int1"}


def source(program: Program, name: str) -> str:
    """The text of `name(<inputs>, <pointers to arrays>)`, which returns the outputs.

    Inputs are tiles that broadcast, or scalars; each value is as large as those that it depends on.

    Raises:
        NotImplementedError: for float64, which no kernel uses.
    """
    names = [name for name, _ in program.inputs]
    pointers = [f"a{i}_ptr" for i in range(len(program.arrays))]
    lines = [f"def {name}({', '.join((*names, *pointers))}):"]
    text = dict(enumerate(names))

    def operand(x: Operand) -> str:
        return _literal(x) if isinstance(x, Literal) else text[x]

    for number, instruction in program.numbered():
        if instruction.op in _SAME:
            text[number] = operand(instruction.operands[0])
            continue
        text[number] = f"x{number}"
        lines.append(f"    x{number} = {_expression(program, instruction, operand)}")
    results = [
        f"tl.zeros([1, 1], tl.{_TYPES.get(x.dtype, x.dtype)}) + {_literal(x)}"
        if isinstance(x, Literal)
        else text[x]
        for x in program.outputs
    ]
    lines.append(f"    return {', '.join(results)}")
    return "@triton.jit\n" + "\n".join(lines) + "\n"


def offset(shape: tuple[int, ...], indices: list[str]) -> str:
    """Where an element lies in an array, its indices clamped: the text of an expression."""
    if not shape:
        return "0"
    wide = math.prod(shape) >= 2**31
    terms = []
    for axis, (size, index) in enumerate(zip(shape, indices)):
        stride = math.prod(shape[axis + 1 :])
        if index.lstrip("-").isdigit():
            terms.append(str(min(max(int(index), 0), size - 1) * stride))
            continue
        index = f"tl.minimum(tl.maximum({index}, 0), {size - 1})"
        terms.append(f"tl.cast({index}, tl.int64) * {stride}" if wide else f"{index} * {stride}")
    return " + ".join(terms)


def _expression(program: Program, instruction: Instruction, operand) -> str:
    op, dtype = instruction.op, instruction.dtype
    operands = [operand(x) for x in instruction.operands]
    computed = [program.dtype(x) for x in instruction.operands if not isinstance(x, Literal)]
    if "float64" in (dtype, *computed):
        raise NotImplementedError(
            f"{op} of float64: kernels compute in float32; with jax_enable_x64 write "
            "jnp.float32(0.5) for Python's 0.5 where it meets integers"
        )
    triton = f"tl.{_TYPES.get(dtype, dtype)}"
    if op == "read":
        (number,) = instruction.params
        loaded = f"tl.load(a{number}_ptr + {offset(program.arrays[number][0], operands)})"
        return f"{loaded} != 0" if dtype == "bool" else loaded
    if op == "convert_element_type":
        if dtype == "bool":
            return f"{operands[0]} != 0"
        # Triton 3.9's interpreter takes integers for the bits of a bfloat16.
        first = ".to(tl.float32)" if dtype == "bfloat16" and "float" not in computed[0] else ""
        return f"{operands[0]}{first}.to({triton})"
    if op == "bitcast_convert_type":
        return f"{operands[0]}.to({triton}, bitcast=True)"
    # 16-bit floats: each result is rounded, as in JAX.
    narrow = [
        program.dtype(x) in _HALF and not isinstance(x, Literal) for x in instruction.operands
    ]
    operands = [f"{x}.to(tl.float32)" if is_half else x for x, is_half in zip(operands, narrow)]
    result = _computed(instruction, operands, dtype)
    return f"({result}).to({triton})" if dtype in _HALF else result


def _computed(instruction: Instruction, operands: list[str], dtype: str) -> str:
    op = instruction.op
    floating = "float" in dtype
    nan = f", {_NAN}" if floating else ""
    if op in ("max", "min"):
        return f"tl.{op}imum({operands[0]}, {operands[1]}{nan})"
    if op == "clamp":
        low, x, high = operands
        return f"tl.minimum(tl.maximum({x}, {low}{nan}), {high}{nan})"
    if op == "shift_right_logical":
        x, count = (f"tl.cast({x}, tl.u{dtype.removeprefix('u')})" for x in operands)
        return f"({x} >> {count}).to(tl.{dtype})"
    if op == "div":
        return f"{operands[0]} {'/' if floating else '//'} {operands[1]}"
    if op == "round":
        return _ROUND[instruction.params[0]].format(*operands)
    if op == "integer_pow":
        return _integer_power(operands[0], instruction.params[0])
    if op == "select_n" and len(operands) > 3:
        which, *cases = operands
        result = cases[-1]
        for i, case in reversed(list(enumerate(cases[:-1]))):
            result = f"tl.where({which} == {i}, {case}, {result})"
        return result
    return _TEMPLATES[op].format(*operands)


def _integer_power(x: str, exponent: int) -> str:
    """A product; by squares, for that is what XLA does."""
    if exponent < 0:
        return f"1.0 / ({_integer_power(x, -exponent)})"
    if exponent == 0:
        return f"{x} * 0 + 1"
    if exponent % 2:
        return x if exponent == 1 else f"{x} * ({_integer_power(x, exponent - 1)})"
    half = _integer_power(x, exponent // 2)
    return f"({half}) * ({half})"


def _literal(x: Literal) -> str:
    if isinstance(x.value, float) and not math.isfinite(x.value):
        return f'float("{x.value}")'
    return f"({x.value})" if not isinstance(x.value, bool) and x.value < 0 else str(x.value)

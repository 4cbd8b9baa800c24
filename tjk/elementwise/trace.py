"""From a JAX function of scalars to a program."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core import Literal as JaxLiteral

from tjk.elementwise.evaluate import BINARY, OTHER, SUPPORTED, UNARY, evaluate
from tjk.elementwise.program import Builder, Instruction, Literal, Operand, Program, literal

# Operations that only call what they hold.
_CALLS = ("checkpoint", "closed_call", "core_call", "jit", "pjit", "remat", "remat2")
# The same, of functions that say themselves what their derivative is.
_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
# More scalars than that in one array are no index, but a mistake.
_MOST_SCALARS = 64


class _View(NamedTuple):
    """An array that is read, of which some axes have their index already.

    Attributes:
        number: of the array.
        indices: for each of its axes an operand, or None.
        dims: of the value that it is, the axis that each runs along; None for one of size 1.
    """

    number: int
    indices: tuple[Operand | None, ...]
    dims: tuple[int | None, ...]


# An array of operands, shape () or that of an index; or a view; or what is known while tracing.
_Value = np.ndarray | _View | Array


def trace(
    op: str,
    name: str,
    function: Callable[..., Any],
    inputs: Mapping[str, str],
    result: str,
) -> tuple[Program, tuple[Array, ...]]:
    """The program of a function, and the arrays that it reads.

    The function takes scalars and returns one. Arrays that it closes over are read at scalar
    indices; what it computes from them alone is computed once, outside of the program. Gradients
    are those of `jax.custom_jvp` and `jax.custom_vjp` where it calls functions that have them.

    Args:
        op: the public function's name.
        name: what it calls this function.
        function: of as many scalars as there are inputs.
        inputs: name and dtype of each; integers are taken to be at least 0.
        result: the dtype that the function returns.

    Raises:
        TypeError: where the function takes other arguments, or returns something else.
        NotImplementedError: for operations that a program cannot hold.
    """
    where = f"{op}: {name}"
    scalars = [jax.ShapeDtypeStruct((), jnp.dtype(dtype)) for dtype in inputs.values()]
    _check_arity(where, function, inputs)
    with jax.numpy_dtype_promotion("standard"):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*scalars)
    if closed.effects:
        effects = ", ".join(sorted(map(str, closed.effects)))
        raise NotImplementedError(f"{where} must have no side effects, got {effects}")
    leaves = jax.tree.leaves(shapes)
    if len(leaves) != 1 or not hasattr(shapes, "shape") or shapes.shape != ():
        raise TypeError(f"{where} must return a scalar, got {shapes}")
    if not _fits(shapes, result):
        raise TypeError(f"{where} must return {result}, got {shapes.dtype}")
    tracer = _Tracer(where, tuple(inputs.items()), differentiable=True)
    (output,) = tracer.run(closed, [np.array(i, object) for i in range(len(inputs))])
    number = tracer.scalar(output)
    if shapes.dtype != result:
        number = tracer.convert(number, result)
    return tracer.builder.program((number,)), tuple(tracer.arrays)


def trace_outputs(
    function: Callable[..., Any], program: Program, more: tuple[tuple[str, str], ...]
) -> Program:
    """A function of a program's inputs, some more, and the program's arrays, of several outputs.

    The program that it makes is not differentiated again.
    """
    inputs = (*program.inputs, *more)
    scalars = [jax.ShapeDtypeStruct((), jnp.dtype(dtype)) for _, dtype in inputs]
    structs = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in program.arrays]
    closed = jax.make_jaxpr(function)(*scalars, structs)
    tracer = _Tracer("derivative", inputs, differentiable=False)
    tracer.builder.arrays.extend(program.arrays)
    views = [_whole(i, len(shape)) for i, (shape, _) in enumerate(program.arrays)]
    outputs = tracer.run(closed, [*(np.array(i, object) for i in range(len(inputs))), *views])
    return tracer.builder.program(tuple(tracer.scalar(x) for x in outputs))


def _check_arity(where: str, function: Callable[..., Any], inputs: Mapping[str, str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function without a signature tells it when called
        return
    try:
        signature.bind(*inputs)
    except TypeError:
        names = ", ".join(inputs)
        raise TypeError(f"{where} must take ({names}), got a function of {signature}") from None


def _fits(shape: Any, result: str) -> bool:
    """Whether a result has its dtype, or is a Python number of the kind."""
    if shape.dtype == result:
        return True
    wanted = jnp.dtype(result)
    kinds = (jnp.floating, jnp.integer) if jnp.issubdtype(wanted, jnp.floating) else ()
    return shape.weak_type and any(jnp.issubdtype(shape.dtype, kind) for kind in kinds)


class _Tracer:
    """Interprets a jaxpr whose values are numbers in a program."""

    def __init__(self, where: str, inputs: tuple[tuple[str, str], ...], differentiable: bool):
        self.where = where
        self.differentiable = differentiable
        self.builder = Builder(inputs)
        self.arrays: list[Array] = []
        self._numbers: dict[int, int] = {}

    def run(self, closed: ClosedJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        return self._run(closed.jaxpr, list(closed.consts), arguments)

    def _run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[_Value]
    ) -> list[_Value]:
        known: dict[Var, _Value] = dict(zip(jaxpr.constvars, consts))
        known |= dict(zip(jaxpr.invars, arguments, strict=True))

        def value(x: Any) -> _Value:
            return x.val if isinstance(x, JaxLiteral) else known[x]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [value(x) for x in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [value(x) for x in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, values: list[_Value]) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        is_known = not any(isinstance(x, _View) or _is_scalars(x) for x in values)
        if name in _CALLS or (name in _CUSTOM and not is_known):
            inner = next(
                params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params
            )
            consts = getattr(inner, "consts", ())
            results = self._run(getattr(inner, "jaxpr", inner), consts, values)
            if name in _CUSTOM and self.differentiable:
                return self._with_gradients(equation, values, results)
            return results
        if is_known:
            # Numbers stay numbers, also while an outer function is traced.
            is_traced = any(isinstance(x, jax.core.Tracer) for x in values)
            with contextlib.nullcontext() if is_traced else jax.ensure_compile_time_eval():
                return _alone(equation)(*map(jnp.asarray, values))
        if name in ("dynamic_slice", "gather", "slice") and not _is_scalars(values[0]):
            return [getattr(self, f"_{name}")(values[0], values[1:], params)]
        if isinstance(values[0], _View) and name == "squeeze":
            axes, view = params["dimensions"], values[0]
            kept = tuple(dim for i, dim in enumerate(view.dims) if i not in axes)
            return [view._replace(dims=kept)]
        if rearranged := self._rearrange(name, values, equation):
            return rearranged
        name = "add" if name == "add_any" else name  # what derivatives add with
        if name not in (*UNARY, *BINARY, *OTHER, "one_minus_square"):  # the latter from jax 0.11
            self._refuse(name)
        scalars = [self._scalars(x) for x in values]
        shape = equation.outvars[0].aval.shape
        scalars = [np.broadcast_to(x, shape) for x in scalars]
        dtype, extra = str(equation.outvars[0].aval.dtype), _params(name, params)
        result = np.empty(shape, object)
        for index in np.ndindex(shape):
            operands = tuple(x[index] for x in scalars)
            if name == "convert_element_type":
                result[index] = self.convert(operands[0], dtype)
            elif name == "pow":  # of which the exponent may be an integer
                result[index] = self._add(
                    name, (operands[0], self.convert(operands[1], dtype)), dtype
                )
            elif name == "one_minus_square":
                one = literal(1, dtype)
                factors = (self._add(op, (one, *operands), dtype) for op in ("sub", "add"))
                result[index] = self._add("mul", tuple(factors), dtype)
            else:
                result[index] = self._add(name, operands, dtype, *extra)
        return [result]

    def _add(self, op: str, operands: tuple[Operand, ...], dtype: str, *params: Any) -> Operand:
        """An instruction, or of constants the constant that it makes."""
        if not all(isinstance(x, Literal) for x in operands):
            return self.builder.add(op, operands, dtype, *params)
        program = Program((), (), (Instruction(op, operands, dtype, params),), (0,))
        with jax.ensure_compile_time_eval():
            return literal(evaluate(program, (), ()), dtype)

    def _with_gradients(
        self, equation: JaxprEqn, values: list[_Value], results: list[_Value]
    ) -> list[_Value]:
        """The results of a function with the gradients that it defines."""
        shapes = [x.aval for x in (*equation.invars, *equation.outvars)]
        if any(shape.shape for shape in shapes):
            self._refuse(f"{equation.primitive.name} of arrays")
        inputs = tuple((f"x{i}", str(x.aval.dtype)) for i, x in enumerate(equation.invars))
        floats = [i for i, (_, dtype) in enumerate(inputs) if jnp.issubdtype(dtype, jnp.floating)]
        function = _alone(equation)
        operands = tuple(map(self.scalar, values))
        ruled = []
        for number, (variable, result) in enumerate(zip(equation.outvars, results, strict=True)):
            dtype = str(variable.aval.dtype)
            if not floats or not jnp.issubdtype(dtype, jnp.floating):
                ruled.append(result)
                continue

            def gradients(*arguments: Array, number: int = number) -> tuple[Array, ...]:
                *primals, d, _ = arguments

                def output(*variables: Array) -> Array:
                    merged = dict(enumerate(primals)) | dict(zip(floats, variables))
                    return function(*merged.values())[number]

                return jax.vjp(output, *(primals[i] for i in floats))[1](d)

            rule = trace_outputs(gradients, Program(inputs, (), (), ()), (("d", dtype),))
            if rule.arrays:
                self._refuse(f"{equation.primitive.name} whose derivative reads arrays")
            operand = self.builder.add(
                "custom_gradient", (self.scalar(result), *operands), dtype, rule
            )
            ruled.append(np.array(operand, object))
        return ruled

    def scalar(self, value: _Value) -> Operand:
        """The operand that a value of shape () is."""
        return self._scalars(value)[()]

    def convert(self, operand: Operand, dtype: str) -> Operand:
        if isinstance(operand, Literal):
            return literal(operand.value, dtype)
        if self.builder.dtype(operand) == dtype:
            return operand
        return self.builder.add("convert_element_type", (operand,), dtype)

    def _refuse(self, name: str) -> None:
        supported = ", ".join(SUPPORTED)
        raise NotImplementedError(
            f"{self.where} must consist of supported operations, got {name!r}; supported are "
            f"reads of arrays at scalar indices and {supported}"
        )

    def _scalars(self, value: _Value) -> np.ndarray:
        """A value as an array of operands."""
        if _is_scalars(value):
            return value
        if isinstance(value, _View):
            if None in value.indices:
                self._refuse("an operation on a whole array")
            return np.full((1,) * len(value.dims), self._read(value), object)
        shape = jnp.shape(value)
        if np.prod(shape, dtype=int) > _MOST_SCALARS:
            self._refuse(f"an operation on an array of shape {shape}")
        result = np.empty(shape, object)
        for index in np.ndindex(shape):
            result[index] = self._constant(value[index] if index else value)
        return result

    def _constant(self, x: Any) -> Operand:
        if isinstance(x, jax.core.Tracer):
            return self._read(_whole(self._number(x), 0))
        return literal(np.asarray(x)[()], jnp.result_type(x))

    def _number(self, array: Any) -> int:
        """Of an array that is read; each has one."""
        if id(array) not in self._numbers:
            self._numbers[id(array)] = len(self.builder.arrays)
            self.builder.arrays.append((jnp.shape(array), str(jnp.result_type(array))))
            self.arrays.append(jnp.asarray(array) if isinstance(array, np.ndarray) else array)
        return self._numbers[id(array)]

    def _read(self, view: _View) -> Operand:
        dtype = self.builder.arrays[view.number][1]
        return self.builder.add("read", view.indices, dtype, view.number)

    def _view(self, value: _Value) -> _View:
        if isinstance(value, _View):
            return value
        return _whole(self._number(value), jnp.ndim(value))

    def _narrow(self, view: _View, starts: Sequence[Operand | None], sizes: Sequence[int]) -> _View:
        """The part of a view at `starts`, one for each of its dims; None where that has all."""
        shape, indices, dims = self.builder.arrays[view.number][0], list(view.indices), []
        for axis, start, size in zip(view.dims, starts, sizes, strict=True):
            if axis is None or (size == shape[axis] and size != 1):
                dims.append(axis)
                continue
            if size != 1:
                self._refuse("a slice of several elements")
            dims.append(None)
            indices[axis] = Literal(0, "int32") if start is None else start
        return _View(view.number, tuple(indices), tuple(dims))

    def _slice(self, value: _Value, _: Any, params: Mapping[str, Any]) -> _Value:
        starts = [literal(start, "int32") for start in params["start_indices"]]
        sizes = np.subtract(params["limit_indices"], params["start_indices"])
        return self._narrow(self._view(value), starts, sizes.tolist())

    def _dynamic_slice(
        self, value: _Value, starts: Sequence[_Value], params: Mapping[str, Any]
    ) -> _Value:
        operands = [self.scalar(start) for start in starts]
        return self._narrow(self._view(value), operands, params["slice_sizes"])

    def _gather(self, value: _Value, rest: Sequence[_Value], params: Mapping[str, Any]) -> _Value:
        (indices,), numbers, view = rest, params["dimension_numbers"], self._view(value)
        operands = self._scalars(indices).reshape(-1)
        if len(operands) != len(numbers.start_index_map) or numbers.operand_batching_dims:
            self._refuse("a read at several indices")
        starts: list[Operand | None] = [None] * len(view.dims)
        for dim, operand in zip(numbers.start_index_map, operands):
            starts[dim] = operand
        part = self._narrow(view, starts, params["slice_sizes"])
        kept = [d for i, d in enumerate(part.dims) if i not in numbers.collapsed_slice_dims]
        rank = len(kept) + np.ndim(indices) - 1
        dims: list[int | None] = [None] * rank
        for position, dim in zip(numbers.offset_dims, kept):
            dims[position] = dim
        result = _View(part.number, part.indices, tuple(dims))
        if params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
            return result
        if None in result.indices:
            self._refuse("a read of several elements with mode='fill'")
        return np.full((1,) * rank, self._filled(result, params["fill_value"]), object)

    def _filled(self, view: _View, fill: Any) -> Operand:
        """A read, or `fill` (None is JAX's default) where an index lies outside."""
        shape, dtype = self.builder.arrays[view.number]
        result = self._read(view)
        if fill is None:
            fill = np.nan
            if not jnp.issubdtype(dtype, jnp.inexact):
                limits = jnp.iinfo(dtype)
                fill = limits.min if limits.min else limits.max
        for size, index in zip(shape, view.indices):
            integers = index.dtype if isinstance(index, Literal) else self.builder.dtype(index)
            for compare, bound in (("lt", 0), ("gt", size - 1)):
                outside = self.builder.add(compare, (index, literal(bound, integers)), "bool")
                operands = (outside, result, literal(fill, dtype))
                result = self.builder.add("select_n", operands, dtype)
        return result

    def _rearrange(
        self, name: str, values: list[_Value], equation: JaxprEqn
    ) -> list[_Value] | None:
        """What moves operands in an index without computing, or None if it computes."""
        shape = equation.outvars[0].aval.shape
        if np.prod(shape, dtype=int) > _MOST_SCALARS:
            self._refuse(f"an operation on an array of shape {shape}")
        if name == "concatenate":
            parts = [self._scalars(x) for x in values]
            return [np.concatenate(parts, equation.params["dimension"])]
        if name == "broadcast_in_dim":
            x = self._scalars(values[0])
            axes = equation.params["broadcast_dimensions"]
            full = [1] * len(shape)
            for axis, size in zip(axes, x.shape):
                full[axis] = size
            return [np.broadcast_to(x.reshape(full), shape)]
        if name in ("reshape", "squeeze"):
            return [self._scalars(values[0]).reshape(shape)]
        if name == "slice":
            bounds = zip(equation.params["start_indices"], equation.params["limit_indices"])
            return [self._scalars(values[0])[tuple(slice(*pair) for pair in bounds)]]
        if name in ("copy", "optimization_barrier", "pcast", "pvary"):
            return [self._scalars(x) for x in values]
        return None


def _alone(equation: JaxprEqn) -> Callable[..., list[Array]]:
    """An equation as a function of its operands."""
    operands = [Var(x.aval) for x in equation.invars]
    results = [Var(x.aval) for x in equation.outvars]
    equation = equation.replace(invars=operands, outvars=results)
    names = DebugInfo("equation", equation.primitive.name, None, None)
    jaxpr = Jaxpr((), operands, results, [equation], equation.effects, names)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))


def _whole(number: int, rank: int) -> _View:
    return _View(number, (None,) * rank, tuple(range(rank)))


def _is_scalars(value: _Value) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object


def _params(name: str, params: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a primitive's parameters says what it computes."""
    if name == "integer_pow":
        return (params["y"],)
    if name == "round":
        return (int(params["rounding_method"]),)
    return ()

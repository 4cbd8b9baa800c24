"""Runs a launch in Triton's interpreter on the CPU, and stops at what a GPU would let pass.

Every pointer is checked against the buffers of the launch, every output element must be written,
and a masked load without `other` gives NaN. Buffers lie apart, so that a row too many does not land
in a neighbour.

Corrects the interpreter where it computes something else than a GPU (Triton 3.6 to 3.9): a product
of bfloat16 multiplies bit patterns, a conversion from float32 to bfloat16 truncates, and TF32
products keep all bits of their operands.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as triton_interpreter

from tjk.executors.options import pointer_type
from tjk.launch import Launch

# The interpreter keeps the grid and the patched language in globals, and JAX may call back from
# several threads.
_lock = threading.Lock()

_GAP_BYTES = 1024  # between buffers: more than one row of most tiles


def call(*inputs: jax.Array, launch: Launch) -> tuple[jax.Array, ...]:
    """The launch as a JAX computation, through a callback."""
    return jax.pure_callback(functools.partial(interpret, launch), launch.outputs, *inputs)


def interpret(launch: Launch, *inputs: Any) -> tuple[np.ndarray, ...]:
    """Runs the launch on arrays and returns its outputs.

    Raises:
        triton.runtime.errors.InterpreterError: for an access outside the launch's buffers, or an
            output with an element that no program wrote.
    """
    memory = _Memory()
    pointers = [memory.add(np.asarray(x), written=True) for x in inputs]
    for i, out in enumerate(launch.outputs):
        blank = np.zeros(out.shape, out.dtype)
        pointers.append(memory.add(blank, written=i in launch.zeroed))
    n = len(launch.inputs)
    arguments = (*pointers[:n], *launch.scalars, *pointers[n:])
    with _lock, _corrected(memory), np.errstate(all="ignore"):
        executor = _Executor(launch.kernel.rewrite(), launch.kernel.arg_names, launch.grid)
        executor(*arguments, **dict(launch.constexprs))
    return tuple(pointer.result(launch.name) for pointer in pointers[n:])


class _Pointer:
    """What the interpreter takes for a tensor: a start address and an element type."""

    def __init__(self, array: np.ndarray, written: bool):
        raw = np.full(array.nbytes + 2 * _GAP_BYTES + 64, 0xFF, np.uint8)
        skip = -raw.ctypes.data % 64 + _GAP_BYTES
        self.data = raw[skip : skip + array.nbytes].view(array.dtype).reshape(array.shape)
        if written:
            self.data[...] = array
        self.dtype = pointer_type(array.dtype).removeprefix("*")
        self.start = raw.ctypes.data + skip
        self.itemsize = array.dtype.itemsize
        self.written = np.full(array.size, written)

    def data_ptr(self) -> int:
        return self.start

    def result(self, kernel: str) -> np.ndarray:
        if not self.written.all():
            first = np.unravel_index(int(np.argmin(self.written)), self.data.shape)
            raise triton_interpreter.InterpreterError(
                f"{kernel}: no program wrote element {tuple(map(int, first))} of an output of "
                f"shape {self.data.shape}"
            )
        return self.data


class _Memory:
    """The buffers of one launch."""

    def __init__(self) -> None:
        self.pointers: list[_Pointer] = []

    def add(self, array: np.ndarray, *, written: bool) -> _Pointer:
        pointer = _Pointer(array, written)
        self.pointers.append(pointer)
        return pointer

    def access(self, handle: Any, mask: Any, *, write: bool) -> None:
        """Checks the addresses of a tile and notes what is written."""
        addresses = np.atleast_1d(handle.data)
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape)]
        addresses = addresses.ravel()
        left = addresses.size
        for pointer in self.pointers if left else ():
            offsets = (addresses - np.uint64(pointer.start)).view(np.int64) // pointer.itemsize
            offsets = offsets[(offsets >= 0) & (offsets < pointer.written.size)]
            left -= offsets.size
            if write:
                pointer.written[offsets] = True
            if not left:
                return
        if left:
            kind = "store" if write else "load"
            raise IndexError(f"{kind} outside of the buffers: {left} of {addresses.size} elements")


class _Executor(triton_interpreter.GridExecutor):
    """Triton's own loop over the grid, without its copies from and to torch tensors."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
        return args_dev, kwargs

    def _restore_args_dev(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def _corrected(memory: _Memory) -> Iterator[None]:
    """Replaces methods of the interpreter's builder while a launch runs."""
    builder = triton_interpreter.interpreter_builder
    handle = triton_interpreter.TensorHandle
    original = {
        name: getattr(builder, name)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw")
    }
    cast = builder.cast_impl

    def load(ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        memory.access(ptrs, mask, write=False)
        if other is None and not mask.data.all():
            element = ptrs.get_element_ty()
            blank = np.full(ptrs.data.shape + (element.primitive_bitwidth // 8,), 0xFF, np.uint8)
            if element.is_floating():
                dtype = triton_interpreter._get_np_dtype(element)
                other = handle(blank.view(dtype)[..., 0], element)
        return original["create_masked_load"](ptrs, mask, other, *rest)

    def store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.access(ptrs, mask, write=True)
        return original["create_masked_store"](ptrs, value, mask, *rest)

    def atomic(op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        # An atomic reads what it adds to, so it does not count as the write of an output.
        memory.access(ptr, mask, write=False)
        return original["create_atomic_rmw"](op, ptr, value, mask, *rest)

    def dot(a: Any, b: Any, d: Any, input_precision: Any, *_: Any) -> Any:
        lhs, rhs = (_operand(x, input_precision) for x in (a, b))
        return handle(np.matmul(lhs, rhs, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def convert(src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = src.data.astype(ml_dtypes.bfloat16).view(np.uint16)
            return handle(rounded, tl.bfloat16)
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return handle(_widen(src.data), tl.float32)
        return cast(src, dst_type)

    patches = {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": atomic,
        "create_dot": dot,
        "cast_impl": convert,
    }
    vars(builder).update(patches)
    try:
        yield
    finally:
        for name in patches:
            delattr(builder, name)


def _operand(x: Any, input_precision: Any) -> np.ndarray:
    """An operand of a product as the tensor cores see it."""
    if x.dtype.scalar == tl.bfloat16:
        return _widen(x.data)
    if x.dtype.scalar == tl.float32 and input_precision == ir.INPUT_PRECISION.TF32:
        return truncate_to_tf32(x.data)
    return x.data


def _widen(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


def truncate_to_tf32(x: np.ndarray) -> np.ndarray:
    """Drops the bits that TF32 lacks, as the tensor cores do: Triton 3.9 rounds nothing itself."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)

"""Arrays of more than 2^31 elements: which addresses the last program of each kernel touches.

No memory is there: loads give zeros, and stores note where they would go. In the interpreter a
loop's counter is a Python integer, so that what is computed from it is looked for in Triton's IR.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import ON_GPU
from tjk.executors import interpreter
from tjk.launch import Launch, recording
from tjk.ops import flash_attention

SHAPE = (2, 2**21, 16, 128)  # 2^32 elements in each of two sequences


class Addresses:
    """Stands for the interpreter's memory: buffers far apart, of which nothing is allocated."""

    def __init__(self, launch: Launch):
        structs = (*launch.inputs, *launch.outputs)
        self.starts = [(i + 1) << 40 for i in range(len(structs))]
        self.sizes = [x.size * x.dtype.itemsize for x in structs]
        self.touched: dict[int, list[np.ndarray]] = {}

    def access(self, handle, mask, *, write):
        addresses = np.atleast_1d(handle.data)
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape)]
        for start in np.unique(addresses >> np.uint64(40)):
            buffer = int(start) - 1
            inside = addresses[addresses >> np.uint64(40) == start] - np.uint64(self.starts[buffer])
            self.touched.setdefault(buffer, []).append(inside)

    def last(self, buffer: int) -> int:
        return int(max(x.max() for x in self.touched[buffer]))


def last_tile(launch: Launch) -> int:
    """The program of the last tile of the last head; programs over queries run from the end."""
    programs = launch.grid[0]
    by_query = launch.name in ("attention_forward", "attention_backward_query")
    return programs - programs // (SHAPE[0] * SHAPE[2]) if by_query else programs - 1


def run_last_program(launch: Launch, monkeypatch) -> Addresses:
    memory = Addresses(launch)
    builder = interpreter.triton_interpreter.interpreter_builder
    handle = interpreter.triton_interpreter.TensorHandle

    def load(ptrs, mask, other, *_):
        memory.access(ptrs, mask, write=False)
        element = ptrs.get_element_ty()
        dtype = interpreter.triton_interpreter._get_np_dtype(element)
        return handle(np.zeros(ptrs.data.shape, dtype), element)

    def store(ptrs, value, mask, *_):
        memory.access(ptrs, mask, write=True)

    def atomic(op, ptr, value, mask, *_):
        memory.access(ptr, mask, write=True)
        return value

    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_dim", lambda *_: set_dim(*launch.grid, 1, 1))
    monkeypatch.setattr(builder, "set_grid_idx", lambda *_: set_index(last_tile(launch), 0, 0))

    pointers = []
    for start, x in zip(memory.starts, (*launch.inputs, *launch.outputs)):
        pointer = interpreter._Pointer(np.zeros(0, x.dtype), True)
        pointer.start = start
        pointers.append(pointer)
    n = len(launch.inputs)
    with interpreter._corrected(memory), np.errstate(all="ignore"):
        for name, method in (
            ("create_masked_load", load),
            ("create_masked_store", store),
            ("create_atomic_rmw", atomic),
        ):
            setattr(builder, name, method)
        executor = interpreter._Executor(launch.kernel.rewrite(), launch.kernel.arg_names, (1,))
        executor(*pointers[:n], *launch.scalars, *pointers[n:], **dict(launch.constexprs))
    return memory


def launches(deterministic: bool) -> list[Launch]:
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)

    def loss(query, key, value):
        options = {"local_window_size": (8, 8), "deterministic": deterministic}
        output = flash_attention(query, key, value, implementation="triton", **options)
        return jnp.sum(output.astype(jnp.float32))

    with recording() as records:
        jax.eval_shape(jax.grad(loss, (0, 1, 2)), x, x, x)
    return records


@pytest.mark.skipif(ON_GPU, reason="needs the interpreter")
@pytest.mark.parametrize(("deterministic", "count"), [(False, 2), (True, 3)])
def test_last_program_ends_where_the_arrays_end(monkeypatch, deterministic, count):
    records = launches(deterministic)
    assert len(records) == count
    for launch in records:
        with monkeypatch.context() as patches:
            memory = run_last_program(launch, patches)
        for i, x in enumerate((*launch.inputs, *launch.outputs)):
            if x.dtype == jnp.int32:
                continue  # the lengths, which are not used
            itemsize = x.dtype.itemsize
            assert memory.last(i) == memory.sizes[i] - itemsize, (launch.name, i)
            assert min(a.min() for a in memory.touched[i]) >= 0


def _narrow_row_offsets() -> tuple[int, list[str]]:
    """How many kernels were looked at, and where 32-bit multiples of a row go to a pointer."""
    from unittest import mock

    from triton.compiler.compiler import ASTSource

    from tjk.executors import compiler

    texts = []
    make_ir = ASTSource.make_ir

    def keep(self, *arguments):
        module = make_ir(self, *arguments)
        texts.append(str(module))
        return module

    with mock.patch.object(ASTSource, "make_ir", keep):
        for launch in {x.name: x for x in launches(True) + launches(False)}.values():
            compiler.compile(launch, 86)
    found = []
    for text in texts:
        constants = dict(re.findall(r"(%\S+) = arith\.constant (\d+) : i32", text))
        products = re.findall(r"(%\S+) = arith\.muli %\S+, (%\S+) : i32", text)
        by_row = {name for name, factor in products if int(constants.get(factor, 0)) > SHAPE[3]}
        additions = re.findall(r"tt\.addptr %\S+, (%\S+) : !tt\.ptr<\w+>, i32", text)
        found += [name for name in additions if name in by_row]
    return len(texts), found


def test_rows_are_counted_in_64_bits(native):
    assert native.submit(_narrow_row_offsets).result() == (4, [])

"""Facts that the compiler executor reads from machine code, for every architecture.

Kernels are compiled in a process without the interpreter: the `native` fixture.
"""

import dataclasses
import re
import subprocess
import tempfile
import zlib
from pathlib import Path
from unittest import mock

import jax
import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from tests.executors import kernels
from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import ARCHITECTURES, PTX_VERSION, SHARED_MEMORY, backend_options
from tjk.executors.compiler import Binary

CUDA = tuple(PTX_VERSION)


def _matmul(arch, cuda=13, **options) -> Binary:
    return compiler.compile(kernels.matmul_launch(**options), arch, cuda=cuda)


def _vector(name, arch, *scalars, **options) -> Binary:
    return compiler.compile(kernels.vector_launch(name, *scalars, **options), arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matmul(native, arch, dtype):
    binary = native.submit(_matmul, arch, dtype=dtype).result()
    assert (binary.arch, binary.name) == (arch, "matmul")
    assert binary.tensor_core > 0
    assert binary.global_loads == binary.wide_loads > 0
    assert binary.float64 == 0
    assert binary.spill_bytes == binary.local_accesses == 0
    assert 0 < binary.registers <= 255
    assert 0 < binary.shared_bytes <= SHARED_MEMORY[arch]
    assert (binary.tensor_memory > 0) == (arch == 100)
    assert binary.code.startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spill(native, arch):
    warps = 1024 // (64 if isinstance(arch, str) else 32)  # the fewest registers for each thread
    binary = native.submit(_vector, "normalise", arch, block=2**17, num_warps=warps).result()
    assert binary.spill_bytes > 0
    assert binary.local_accesses > 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float64(native, arch):
    assert native.submit(_vector, "double", arch).result().float64 >= 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_narrow_loads(native, arch):
    binary = native.submit(_vector, "strided", arch, 3).result()
    assert binary.global_loads >= 4
    assert binary.wide_loads == 0
    assert binary.tensor_core == 0


@pytest.mark.parametrize("arch", CUDA)
def test_both_assemblers_take_the_ptx(native, arch):
    binaries = [native.submit(_matmul, arch, cuda=cuda).result() for cuda in (12, 13)]
    assert [b.spill_bytes for b in binaries] == [0, 0]
    major, minor = divmod(PTX_VERSION[arch], 10)
    for binary in binaries:
        assert re.search(r"\.version (\S+)", binary.assembly)[1] == f"{major}.{minor}"


def _assemble_older(arch, version) -> None:
    ptx = compiler.compile(kernels.vector_launch("running_sum"), arch).assembly
    compiler.assemble(re.sub(r"\.version \S+", f".version {version}", ptx), arch, 13)


@pytest.mark.parametrize(
    ("arch", "older"),
    [(80, "7.7"), (86, "7.7"), (89, "7.7"), (90, "7.8"), (100, "8.5"), (120, "8.6")],
)
def test_no_older_ptx_version_assembles(native, arch, older):
    with pytest.raises(RuntimeError, match=r"\.version"):
        native.submit(_assemble_older, arch, older).result()


def _compiled_once() -> list[bool]:
    first = _matmul(86, size=512)
    return [
        first is _matmul(86, size=size, alpha=alpha) for size, alpha in ((640, 0.25), (512, 1.0))
    ]


def test_sizes_and_scalars_share_a_binary_unless_one(native):
    assert native.submit(_compiled_once).result() == [True, False]


def _types(values) -> tuple[list[str], list[str]]:
    from jax_triton import triton_lib

    theirs = getattr(triton_lib, "get_type_id", None) or triton_lib.get_triton_type
    return [compiler.scalar_type(x) for x in values], [theirs(x) for x in values]


def test_integers_have_the_types_that_jax_triton_gives_them(native):
    edges = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**31), -(2**31) - 1]
    ours, theirs = native.submit(_types, edges).result()
    assert ours == theirs


def _is_what_jax_triton_lowers(arch) -> bool:
    """Whether jax-triton's serialised call of a kernel holds the PTX that the compiler makes."""
    launch = dataclasses.replace(kernels.matmul_launch(), arch=arch)

    def product(a, b):
        return executors.run(dataclasses.replace(launch, inputs=(a, b)))

    with mock.patch("zlib.compress", wraps=zlib.compress) as compress:
        jax.jit(product).trace(*launch.inputs).lower(lowering_platforms=("cuda",))
    (call,) = compress.call_args_list
    return compiler.compile(launch, arch).assembly.encode() in call.args[0]


@pytest.mark.parametrize("arch", CUDA)
def test_ptx_is_what_jax_triton_lowers(native, arch):
    assert native.submit(_is_what_jax_triton_lowers, arch).result()


def _without_cache_directory() -> bool:
    with mock.patch.dict("os.environ", TRITON_CACHE_DIR=""):
        return _matmul(80, num_stages=3).spill_bytes == 0


def test_compiles_where_jax_triton_has_emptied_the_cache_directory(native):
    assert native.submit(_without_cache_directory).result()


def _spill_bytes_by_triton() -> int:
    launch = kernels.matmul_launch()
    types = ["*bf16", "*bf16", "i32", "fp32", "*bf16"] + ["constexpr"] * 5
    hints = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 4)}
    source = ASTSource(
        launch.kernel, dict(zip(launch.kernel.arg_names, types)), dict(launch.constexprs), hints
    )
    options = {"num_warps": 4, "num_stages": 2} | backend_options(120)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        cubin = triton.compile(source, GPUTarget("cuda", 120, 32), options).asm["cubin"]
        file = Path(folder, "cubin")
        file.write_bytes(cubin)
        report = subprocess.check_output(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file], text=True
        )
    return int(re.search(r"STACK:(\d+)", report)[1])


@pytest.mark.skipif(triton.__version__ != "3.9.0", reason="what Triton 3.9.0 does")
def test_triton_assembles_with_a_flag_that_makes_sm_120_spill(native):
    """Why `compile` does not use `triton.compile`, which passes --regAllocOptLevel=2."""
    assert native.submit(_spill_bytes_by_triton).result() > 0
    assert native.submit(_matmul, 120).result().spill_bytes == 0


def test_interpreted_kernel_is_an_error():
    launch = kernels.matmul_launch()
    interpreted = InterpretedFunction(lambda x_ptr: None)
    with pytest.raises(ValueError, match="unset TRITON_INTERPRET before Triton is imported"):
        compiler.compile(dataclasses.replace(launch, kernel=interpreted), 86)


@pytest.mark.parametrize("arch", [75, "86", "gfx90a"])
def test_unknown_architecture_is_an_error(arch):
    with pytest.raises(ValueError, match=f"arch must be one of 80, 86, .*, got {arch!r}"):
        compiler.compile(kernels.matmul_launch(), arch)


def test_unknown_cuda_release_is_an_error():
    with pytest.raises(ValueError, match="cuda must be 12 or 13, got 11"):
        compiler.compile(kernels.matmul_launch(), 86, cuda=11)

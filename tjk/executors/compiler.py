"""Compiles launches to machine code without a GPU, and reads facts from the code.

Up to the PTX this is what jax-triton does, with the same types, hints and options, so the PTX is
the very text that runs on a GPU. XLA assembles it there, without the `--regAllocOptLevel=2` that
Triton 3.9's own pipeline passes (with ptxas 13.4 that flag makes some kernels for sm_120 spill);
so it is assembled here without it, too.
"""

import collections
import dataclasses
import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import ASTSource, make_backend

from tjk.executors.architectures import ARCHITECTURES, backend_options
from tjk.executors.options import pointer_type
from tjk.launch import Launch

# Patterns of whole opcodes, NVIDIA's SASS first and AMD's second.
_TENSOR_CORE = r"(UTC)?[HIQO]G?MMA\b.*", r"v_(mfma|smfmac)_.*"
_GLOBAL_LOADS = r"(LDG|LDGSTS|UTMALDG|UBLKCP)\b.*", r"(global|buffer|flat)_load_.*"
_WIDE_LOADS = (
    r"(LDG|LDGSTS)\b.*\.(128|256)\b.*|(UTMALDG|UBLKCP)\b.*",
    r"(global|buffer|flat)_load_.*(dwordx4|b128).*",
)
_LOCAL_ACCESSES = r"(LDL|STL)\b.*", r"scratch_(load|store)_.*"
_FLOAT64 = r"D(ADD|MUL|FMA|SETP|MNMX|MMA)\b.*|.*\.F64\b.*|MUFU\..*64H\b.*", r".*_f64(_.*)?|.*x4f64"


@dataclasses.dataclass(frozen=True)
class Binary:
    """A kernel compiled for one architecture. Counts are of instructions in the code, not executed.

    Attributes:
        arch: the architecture: a CUDA compute capability such as 86, or an AMD name.
        name: the kernel's function name.
        code: the cubin or, for AMD, the hsaco.
        assembly: the PTX or, for AMD, the amdgcn assembly.
        registers: 32-bit registers of one thread; on AMD vector registers.
        spill_bytes: local memory of one thread: spilled registers and indexed arrays.
        shared_bytes: shared memory (LDS) of one program.
        tensor_memory: columns of tensor memory of one program (compute capability 10.0; 512 exist).
    """

    arch: int | str
    name: str
    code: bytes = dataclasses.field(repr=False)
    assembly: str = dataclasses.field(repr=False)
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_memory: int

    @functools.cached_property
    def disassembly(self) -> str:
        """The SASS that the cubin holds; for AMD the assembly, which is machine code already."""
        if isinstance(self.arch, str):
            return self.assembly
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.code)
            file.flush()
            return _tool(triton.knobs.nvidia.nvdisasm.path, "-c", file.name).stdout

    @functools.cached_property
    def opcodes(self) -> collections.Counter[str]:
        """How often each opcode, with its modifiers, occurs."""
        if isinstance(self.arch, str):
            found = re.findall(r"^\s+([a-z]+_\w+)", self.disassembly, re.MULTILINE)
        else:
            line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.:]*)"
            found = re.findall(line, self.disassembly, re.MULTILINE)
        return collections.Counter(found)

    @property
    def tensor_core(self) -> int:
        """Matrix products on tensor cores: HMMA, HGMMA (9.0), UTCHMMA (10.0); MFMA."""
        return self._count(_TENSOR_CORE)

    @property
    def global_loads(self) -> int:
        """Loads from global memory of every width, asynchronous copies included."""
        return self._count(_GLOBAL_LOADS)

    @property
    def wide_loads(self) -> int:
        """Those among `global_loads` that move at least 128 bits per thread, or a tile (TMA)."""
        return self._count(_WIDE_LOADS)

    @property
    def local_accesses(self) -> int:
        """Loads from and stores to local memory."""
        return self._count(_LOCAL_ACCESSES)

    @property
    def float64(self) -> int:
        """Instructions that compute in, or convert from or to, double precision."""
        return self._count(_FLOAT64)

    def _count(self, patterns: tuple[str, str]) -> int:
        pattern = re.compile(patterns[isinstance(self.arch, str)])
        return sum(number for opcode, number in self.opcodes.items() if pattern.fullmatch(opcode))


def compile(launch: Launch, arch: int | str, *, cuda: int = 13) -> Binary:
    """Compiles a launch for an architecture; no GPU and no driver is needed.

    Launches that differ only in shapes and run-time scalars are compiled once.

    Args:
        launch: with arrays or only with shapes.
        arch: a CUDA compute capability (80, 86, 89, 90, 100, 120), or "gfx942" or "gfx950".
        cuda: CUDA release, 12 or 13, whose assembler is used: XLA's differs as the extras do.

    Raises:
        ValueError: unknown arch or cuda; a kernel that was decorated for the interpreter.
        triton.errors.TritonError: the kernel does not compile.
        RuntimeError: the PTX does not assemble.
    """
    if arch not in ARCHITECTURES:
        names = ", ".join(map(str, ARCHITECTURES))
        raise ValueError(f"compile: arch must be one of {names}, got {arch!r}")
    if cuda not in (12, 13):
        raise ValueError(f"compile: cuda must be 12 or 13, got {cuda!r}")
    if not isinstance(launch.kernel, triton.JITFunction):
        raise ValueError(
            f"compile: kernel {launch.name} must be decorated by triton.jit without the "
            f"interpreter, got {type(launch.kernel).__name__}; unset TRITON_INTERPRET before "
            "Triton is imported, in a process of its own"
        )
    types = {}
    constants = dict(launch.constexprs)
    for name, value in launch.arguments():
        if not isinstance(value, int | float):
            types[name] = pointer_type(value.dtype)
        elif value == 1:  # jax-triton specialises on it
            constants[name] = 1
        else:
            types[name] = scalar_type(value)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return _compile(launch.kernel, _pairs(types), _pairs(constants), _pairs(options), arch, cuda)


def scalar_type(value: int | float) -> str:
    """Triton's name of a run-time scalar's type, as jax-triton chooses it.

    fp32 for a float; for an int i32, u32 from 2^31 on, i64 from 2^32 on and below -2^31.
    """
    if isinstance(value, float):
        return "fp32"
    if -(2**31) <= value < 2**31:
        return "i32"
    return "u32" if 0 <= value < 2**32 else "i64"


def _pairs(mapping: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(mapping.items())


@functools.cache
def _compile(
    kernel: Any,
    types: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, int], ...],
    arch: int | str,
    cuda: int,
) -> Binary:
    signature = {name: dict(types).get(name, "constexpr") for name in kernel.arg_names}
    # JAX's buffers are aligned to 16 bytes and more, and jax-triton tells Triton so.
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, dict(constants), hints)
    if isinstance(arch, str):
        text, code, metadata = _lower(source, GPUTarget("hip", arch, 64), dict(options), "hsaco")
        registers, spill_bytes = (
            int(re.search(rf"\.{key}:\s+(\d+)", text)[1])
            for key in ("vgpr_count", "private_segment_fixed_size")
        )
    else:
        _, text, metadata = _lower(source, GPUTarget("cuda", arch, 32), dict(options), "ptx")
        code, registers, spill_bytes = assemble(text, arch, cuda)
    return Binary(
        arch=arch,
        name=metadata["name"],
        code=code,
        assembly=text,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=metadata["shared"],
        tensor_memory=metadata.get("tmem_size") or 0,
    )


def _lower(
    source: ASTSource, target: GPUTarget, options: dict[str, Any], last: str
) -> tuple[Any, Any, dict[str, Any]]:
    """Runs Triton's stages up to `last`: the results of the last two, and what they noted.

    One by one, not by `triton.compile`, which assembles in its own way and cannot do without a
    cache directory (an imported jax-triton 0.3.1 leaves TRITON_CACHE_DIR empty).
    """
    backend = make_backend(target)
    parsed = backend.parse_options(options | backend_options(target.arch))
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, Language.TRITON)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generators = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, generators, backend.get_module_map(), context)
    metadata = dict(vars(parsed))  # the AMD backend reads its options there
    for stage in list(stages)[: list(stages).index(last) + 1]:
        before, module = module, stages[stage](module, metadata)
    return before, module, metadata


def assemble(ptx: str, arch: int, cuda: int) -> tuple[bytes, int, int]:
    """The cubin of a PTX text, with its registers and bytes of local memory per thread.

    Raises:
        RuntimeError: the assembler refuses it.
    """
    nvidia = triton.knobs.nvidia
    assembler = (nvidia.ptxas if cuda == 12 else nvidia.ptxas_blackwell).path
    gpu = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        log = _tool(assembler, "-v", f"--gpu-name={gpu}", str(source), "-o", str(cubin)).stderr
        registers = int(re.search(r"Used (\d+) registers", log)[1])
        spill_bytes = int(re.search(r"(\d+) bytes stack frame", log)[1])
        return cubin.read_bytes(), registers, spill_bytes


def _tool(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr or done.stdout}")
    return done

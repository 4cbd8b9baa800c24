"""What differs between GPU architectures for whoever compiles a kernel: limits and options.

An architecture is a CUDA compute capability without its dot (86 for 8.6) or an AMD name.
"""

from typing import Any

# The lowest PTX version in which a CUDA architecture's kernels assemble. Left alone, Triton 3.9
# writes the newest that its bundled assembler knows (9.4), which older drivers, and the older
# assemblers that XLA may use, refuse. 7.8: Triton orders its shared memory with `::cta` scopes, and
# sm_89 itself needs it; 8.0, 8.6 and 8.7 are the ones that introduced sm_90a, sm_100a and sm_120a.
# Tensor descriptors on sm_90 would need 8.6.
PTX_VERSION = {80: 78, 86: 78, 89: 78, 90: 80, 100: 86, 120: 87}

# Bytes of shared memory (on AMD: LDS) that one program may have.
SHARED_MEMORY: dict[int | str, int] = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
    "gfx942": 65536,
    "gfx950": 163840,
}

# Multiprocessors (compute units) of a large card of each architecture, for programs that are
# lowered where no card is present: how many programs share the work of a persistent kernel.
MULTIPROCESSORS: dict[int | str, int] = {
    80: 108,
    86: 84,
    89: 142,
    90: 132,
    100: 148,
    120: 188,
    "gfx942": 304,
    "gfx950": 256,
}

ARCHITECTURES = tuple(SHARED_MEMORY)


def backend_options(arch: int | str) -> dict[str, Any]:
    """Triton's compiler options that depend on nothing but the architecture.

    Fused multiply-adds are asked for by name: Triton 3.9 warns that 3.10 will stop making them.
    """
    options: dict[str, Any] = {"enable_fp_fusion": True}
    if arch in PTX_VERSION:
        options["ptx_version"] = PTX_VERSION[arch]
    return options

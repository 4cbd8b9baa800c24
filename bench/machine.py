"""The device, the versions and the commit that a result file names."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import tjk

PACKAGES = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "jax_triton": "jax-triton",
    "triton": "triton",
    "numpy": "numpy",
}


def device() -> dict[str, Any]:
    """What it ran on. The keys about a GPU are None on a CPU."""
    first = jax.devices()[0]
    on_gpu = first.platform == "gpu"
    driver, memory_gb = _nvidia_smi(first.device_kind) if on_gpu else (None, None)
    return {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "devices": [str(d) for d in jax.devices()],
        "python": platform.python_version(),
        "device_kind": first.device_kind,
        "gpu": first.device_kind if on_gpu else None,
        "driver": driver,
        "gpu_memory_gb": memory_gb,
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
    }


def label(described: dict[str, Any]) -> str:
    """The device's name for people: that of the GPU, else that of the CPU."""
    return described.get("gpu") or described.get("cpu") or described["device_kind"]


def versions() -> dict[str, str | None]:
    """Versions of everything that matters; None for what is not installed."""
    return {
        "python": platform.python_version(),
        **{name: _version(package) for name, package in PACKAGES.items()},
        "tjk": tjk.__version__,
    }


def git(root: Path = Path(__file__).parents[1]) -> dict[str, Any]:
    """The commit that is checked out at root, and whether a tracked file differs from it.

    Both are None where root is not the top of a repository.
    """
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    commit = _output("git", "-C", str(root), "rev-parse", "--verify", "HEAD")
    if not top or not commit or not root.samefile(top):
        return {"commit": None, "dirty": None}
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _nvidia_smi(name: str) -> tuple[str | None, float | None]:
    """Driver version and memory in GiB of the first card of that name; None where unknown."""
    query = "--query-gpu=driver_version,memory.total,name"
    for line in (_output("nvidia-smi", query, "--format=csv,noheader,nounits") or "").splitlines():
        driver, memory_mib, card = line.split(", ", 2)
        if card == name:
            return driver, round(float(memory_mib) / 1024, 1)
    return None, None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

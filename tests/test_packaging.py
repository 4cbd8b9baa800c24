"""What a fresh process and a stranger's machine meet: imports without a GPU, and what ships."""

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

WITHOUT_TRITON = """
import sys
import warnings
for name in (
    "triton", "jax_triton", "jax_plugins", "jax_cuda12_plugin", "jax_cuda13_plugin",
    "jax_rocm60_plugin", "jax_rocm7_plugin",
):
    sys.modules[name] = None  # neither found nor importable

import jax
import numpy as np
from tjk.ops import flash_attention

x = np.random.default_rng(0).standard_normal((2, 33, 4, 64), np.float32)
expected = jax.nn.dot_product_attention(x, x, x)
for implementation in (None, "xla"):
    output = flash_attention(x, x, x, implementation=implementation)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
try:
    flash_attention(x, x, x, implementation="triton")
except ValueError as error:
    assert "needs the package triton" in str(error), error
else:
    raise AssertionError("implementation='triton' ran without triton")
"""

IMPORT_ONLY = """
import os
import sys

import jax.ad_checkpoint
import jax.extend.core
import jax.interpreters.mlir
import jax.interpreters.xla
from jax._src import xla_bridge

opened, read = [], []
sys.addaudithook(lambda event, details: event == "open" and opened.append(str(details[0])))
find = os._Environ.__getitem__
os._Environ.__getitem__ = lambda environ, key: (read.append(key), find(environ, key))[1]

import tjk
import tjk.executors
import tjk.launch
import tjk.nn.transformer
import tjk.ops

opened = [path for path in opened if not path.endswith(".py") and "__pycache__" not in path]
assert not opened, f"importing tjk opens {opened}"
assert not read, f"importing tjk reads the environment variables {read}"
assert not xla_bridge.backends_are_initialized(), "importing tjk probes devices"
assert not {"triton", "jax_triton"} & sys.modules.keys(), "importing tjk imports Triton"
"""


@pytest.mark.parametrize("program", [WITHOUT_TRITON, IMPORT_ONLY], ids=["without", "import"])
def test_fresh_process(program):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def _setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def _shipped_roots() -> list[Path]:
    patterns = _setup()["options.packages.find"]["include"].split()
    roots = [pattern for pattern in patterns if not pattern.endswith(".*")]
    assert sorted(patterns) == sorted([*roots, *(f"{root}.*" for root in roots)])
    return [ROOT / root for root in roots]


def test_every_module_is_in_a_package_that_ships():
    assert {path.name for path in _shipped_roots()} == {"bench", "kernels_triton", "tjk", "tools"}
    folders = {module.parent for root in _shipped_roots() for module in root.rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


def test_every_data_file_ships():
    patterns = _setup()["options.package_data"]
    shipped = {
        file
        for package, globs in patterns.items()
        for glob in globs.split()
        for file in (ROOT / package).glob(glob)
    }
    present = {
        file
        for root in _shipped_roots()
        for file in root.rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    assert present
    assert present == shipped


def test_contracts_name_every_package():
    contracts = _setup()["importlinter"]["root_packages"].split()
    assert sorted(contracts) == sorted(path.name for path in _shipped_roots())

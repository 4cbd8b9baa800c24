"""The machine code of decoding's launches, compiled without a GPU, and what they move."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest

from tests.conftest import ON_GPU
from tests.ops.attention.test_offsets import run_last_program
from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import MULTIPROCESSORS, SHARED_MEMORY
from tjk.launch import Launch, recording
from tjk.ops.decode import decode_attention
from tjk.ops.decode.tiles import choose_splits


def _launches(arch, dtype, width, group, *, B=1, T=1, S=65536, K=8, **options) -> list[Launch]:
    structs = [
        jax.ShapeDtypeStruct((B, T, K * group, width), dtype),
        *[jax.ShapeDtypeStruct((B, S, K, width), dtype)] * 2,
        jax.ShapeDtypeStruct((B,), jnp.int32),
    ]
    target = contextlib.nullcontext() if arch is None else executors.target(arch)
    with target, recording() as launches:
        jax.eval_shape(
            lambda q, k, v, used: decode_attention(
                q, k, v, lengths=used, implementation="triton", **options
            ),
            *structs,
        )
    return launches


def _facts(arch, dtype, width, group, **options) -> list[dict]:
    """What the tests assert of each launch: plain data, for it crosses processes."""
    facts = []
    for launch in _launches(arch, dtype, width, group, **options):
        binary = compiler.compile(launch, arch)
        copies = re.findall(r"cp\.async\.c[ag].*, (0x\w+|\d+),", binary.assembly)
        facts.append(
            {
                "name": launch.name,
                "spill": binary.spill_bytes,
                "float64": len(re.findall(r"[._]f64\b", binary.assembly)),
                "tensor core": len(re.findall(r"\bw?g?mma[._]|v_mfma", binary.assembly)),
                "copies": len(copies),
                "narrow copies": sum(int(size, 0) < 16 for size in copies),
                "programs of shared memory": SHARED_MEMORY[arch] // max(binary.shared_bytes, 1),
            }
        )
    return facts


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize(
    ("arch", "dtype", "group"),
    [
        *((80, "bfloat16", 8), (86, "float16", 1), (86, "float16", 8), (89, "bfloat16", 1)),
        *((90, "bfloat16", 1), (90, "bfloat16", 8), (100, "float16", 8), (120, "bfloat16", 1)),
        ("gfx942", "bfloat16", 8),
    ],
)
def test_16_bit(native, arch, dtype, width, group):
    """Two programs share a multiprocessor, and copy the cache 128 bits at a time."""
    (parts,) = native.submit(_facts, arch, dtype, width, group, splits=1).result()
    assert parts["spill"] == parts["float64"] == 0, parts
    assert parts["tensor core"] > 0
    assert parts["programs of shared memory"] >= 2
    assert parts["narrow copies"] == 0
    assert parts["copies"] > 0 or arch == "gfx942"


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize(("arch", "width"), [(86, 64), (90, 128), (86, 256)])
def test_float32(native, arch, width, precision):
    """TF32 products, and full ones without tensor cores."""
    options = {"precision": precision, "splits": 1}
    (parts,) = native.submit(_facts, arch, "float32", width, 8, **options).result()
    assert parts["spill"] == parts["float64"] == 0, parts
    assert (parts["tensor core"] > 0) is (precision == "default")
    assert parts["programs of shared memory"] >= (2 if width < 256 else 1)
    assert parts["narrow copies"] == 0
    assert parts["copies"] > 0


@pytest.mark.parametrize(
    ("arch", "dtype", "width"),
    [
        *((80, "bfloat16", 24), (86, "float32", 160), (90, "bfloat16", 128), (90, "float32", 80)),
        *((100, "bfloat16", 64), (120, "float16", 256), ("gfx942", "bfloat16", 160)),
    ],
)
def test_many_rows_every_flag_and_parts(native, arch, dtype, width):
    options = {"T": 5, "local_window_size": 4096, "logits_soft_cap": 30.0, "splits": 4}
    for launch in native.submit(_facts, arch, dtype, width, 8, **options).result():
        assert launch["spill"] == launch["float64"] == 0, launch
        assert launch["programs of shared memory"] >= 1, launch


@pytest.mark.parametrize("arch", list(MULTIPROCESSORS))
def test_one_sequence_fills_the_card(arch):
    parts, combine = _launches(arch, "bfloat16", 128, 8)
    assert 2 * MULTIPROCESSORS[arch] <= parts.grid[0] < 2 * MULTIPROCESSORS[arch] + 8
    assert combine.grid == (64,)


@pytest.mark.parametrize(("B", "K"), [(33, 8), (132, 2), (1, 300)])
def test_many_sequences_need_one_launch(B, K):
    (launch,) = _launches(90, "bfloat16", 64, 4, B=B, K=K, S=1024)
    assert launch.grid == (B * K,)
    assert launch.outputs[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("T", [1, 5])
def test_the_cache_is_read_once(T):
    """And what else moves is small beside it."""
    launches = _launches(90, "bfloat16", 128, 8, T=T)
    cache = 2 * 65536 * 8 * 128 * 2
    assert cache < sum(launch.bytes for launch in launches) < (1 + T / 40) * cache
    (window,) = (x.bytes for x in _launches(90, "bfloat16", 128, 8, local_window_size=99, splits=1))
    assert 2 * 100 * 8 * 128 * 2 < window < 2.2 * 100 * 8 * 128 * 2


def test_queries_of_a_head_share_a_program():
    """Up to 64 rows, and no more programs than for one row."""
    grids = [_launches(90, "bfloat16", 64, 8, T=T, splits=3)[0].grid for T in (1, 2, 8, 9)]
    assert grids == [(24,), (24,), (24,), (48,)]


@pytest.mark.parametrize(
    ("programs", "tiles", "splits"),
    [
        (8, 1024, 33),
        (8, 10, 10),
        (264, 1024, 1),
        (263, 1024, 2),
        (10**6, 5, 1),
        (1, 0, 1),
        (0, 9, 9),
    ],
)
def test_choice_of_splits(programs, tiles, splits):
    assert choose_splits(programs, tiles, 132) == splits


def _narrow_offsets() -> list[str]:
    """Additions of 32-bit scalars to pointers, of which a cache's row number would be one."""
    from unittest import mock

    from triton.compiler.compiler import ASTSource

    texts = []
    make_ir = ASTSource.make_ir

    def keep(self, *arguments):
        texts.append(str(make_ir(self, *arguments)))
        return make_ir(self, *arguments)

    with mock.patch.object(ASTSource, "make_ir", keep):
        compiler.compile(_launches(86, "bfloat16", 32, 3)[0], 86)
    assert len(texts) == 1
    assert re.search(r"tt\.addptr .*!tt\.ptr<bf16>, i64", texts[0])
    return re.findall(r"tt\.addptr .*!tt\.ptr<\w+>, i32", texts[0])


def test_rows_are_counted_in_64_bits(native):
    assert native.submit(_narrow_offsets).result() == []


@pytest.mark.skipif(ON_GPU, reason="needs the interpreter")
def test_last_program_ends_where_the_arrays_end(monkeypatch):
    """With 2^32 elements of output in parts."""
    options = {"B": 2**9, "T": 8, "K": 4, "splits": 2**10, "precision": "highest"}
    for launch in _launches(None, "float32", 256, 1, S=2**14, **options):
        with monkeypatch.context() as patches:
            memory = run_last_program(launch, patches)
        structs = (*launch.inputs, *launch.outputs)
        for i in range(len(structs)):
            if launch.name == "decode_parts" and i in (1, 2):
                continue  # the cache: its length reads as 0
            assert memory.last(i) == memory.sizes[i] - structs[i].dtype.itemsize, (launch.name, i)
            assert min(a.min() for a in memory.touched[i]) >= 0

"""The parts of `tools.programs` that need no GPU compiler: its verdict, its command line."""

import re

import pytest

from bench.suites import SUITES, ssm
from tools import programs
from tools.cards import CARDS, target_config


def _rows(short: float, long: float, calls: int = 8) -> list[dict]:
    """Rows of tjk's float32 train_step with temporaries in GiB, and one of a baseline."""
    row = {"suite": "transformer", "attention": "tjk", "dtype": "float32", "op": "train_step"}
    sizes = {1024: short, 4096: long}
    ours = [
        row | {"tokens": tokens, "temporary_bytes": int(size * 2**30), "triton_calls": calls}
        for tokens, size in sizes.items()
    ]
    baseline = {"attention": "jax_xla", "temporary_bytes": 16 * 2**30, "triton_calls": 0}
    return [*ours, ours[-1] | baseline]


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (_rows(0.75, 3.0), []),
        (_rows(0.8, 3.1), ["at T=4096 are 3.10 GiB, at most 3 are"]),
        (_rows(0.5, 2.2), ["grow 4.40 times from T=1024 to 4096"]),
        (_rows(0.5, 3.5), ["at T=4096 are 3.50 GiB", "grow 7.00 times"]),
        (_rows(0.75, 3.0, calls=0), ["launches no Triton kernel"]),
        (_rows(0.75, 3.0)[1:], ["not compiled: the float32 train_step of tjk at T in [1024]"]),
    ],
)
def test_check(rows, wrong):
    found = programs.check_transformer(rows)
    assert len(found) == len(wrong)
    for message, part in zip(found, wrong):
        assert part in message


def _moe_rows(share: float, **ours) -> list[dict]:
    """Rows of both implementations' train_step; tjk's temporaries are a share of the other's."""
    row = {"suite": "moe", "tokens": 32768, "op": "train_step", "triton_calls": 9}
    row |= {"row_copies": [], "weight_moves": []}
    theirs = {"impl": "ragged_dot", "temporary_bytes": 1000, "triton_calls": 0}
    theirs |= {"row_copies": ["gather.1"], "weight_moves": ["transpose.1"]}
    mine = {"impl": "tjk", "temporary_bytes": int(1000 * share)} | ours
    return [row | {"dtype": d} | one for d in ("float32", "bfloat16") for one in (mine, theirs)]


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (_moe_rows(0.5), []),
        (_moe_rows(0.51), ["are 0.51 of ragged_dot's, at most 0.5 is allowed"]),
        (_moe_rows(0.2, triton_calls=0), ["launches no Triton kernel"]),
        (_moe_rows(0.2, row_copies=["gather.7"]), ["has arrays of (M k, D): gather.7"]),
        (_moe_rows(0.2, weight_moves=["copy.3", "b"]), ["rearranges expert weights: copy.3, b"]),
        ([row | {"tokens": 4096} for row in _moe_rows(0.2)], ["not compiled"]),
        ([row | {"op": "forward"} for row in _moe_rows(0.2)], ["not compiled"]),
    ],
)
def test_check_of_the_expert_layer(rows, wrong):
    found = programs.check_moe(rows)
    assert len(found) == 2 * len(wrong)
    for message, dtype in zip(found, ("float32", "bfloat16")):
        assert f"the {dtype} train_step of 32768 tokens" in message
        assert wrong[0] in message


def test_baseline_that_was_not_compiled_is_missing():
    found = programs.check_moe([row for row in _moe_rows(0.2) if row["impl"] == "tjk"])
    assert [message.split(":")[0] for message in found] == ["not compiled"] * 2


def _ssm_rows(**ours) -> list[dict]:
    """Rows of each cell's train_step; tjk's at L = 4096 are changed as said."""
    row = {"suite": "ssm", "dtype": "float32", "op": "train_step", "largest_array": 4}
    short = row | {"impl": "tjk", "tokens": 1024, "temporary_bytes": 250, "triton_calls": 9}
    theirs = row | {"impl": "jax_xla", "tokens": 4096, "temporary_bytes": 3000, "triton_calls": 0}
    long = short | {"tokens": 4096, "temporary_bytes": 1000} | ours
    return [one | {"cell": cell} for cell in ssm.CELLS for one in (short, theirs, long)]


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (_ssm_rows(), None),
        (_ssm_rows(temporary_bytes=1001), "are 0.33 of jax_xla's, at most 1/3 is allowed"),
        (_ssm_rows(triton_calls=0), "launches no Triton kernel"),
        (_ssm_rows(largest_array=128.0), "has an array of 128 B L D elements, at most 8"),
        ([r for r in _ssm_rows() if r["tokens"] == 4096], "not compiled"),
        ([r for r in _ssm_rows() if r["impl"] == "tjk"], "not compiled"),
    ],
)
def test_check_of_the_scans(rows, wrong):
    found = programs.check_ssm(rows)
    assert len(found) == (0 if wrong is None else len(ssm.CELLS))
    for message, cell in zip(found, ssm.CELLS):
        assert wrong in message
        assert f" {cell}" in message


def test_temporaries_of_the_scans_are_linear_in_length():
    rows = [r | ({"temporary_bytes": 200} if r["tokens"] == 1024 else {}) for r in _ssm_rows()]
    for message in programs.check_ssm(rows):
        assert "grow 5.00 times from L=1024 to 4096, at most 4.2 is allowed" in message


def _unet_rows(share: float, **ours) -> list[dict]:
    row = {"suite": "unet", "dtype": "float32", "resolution": 64, "batch": 8, "op": "train_step"}
    theirs = row | {"impl": "jax_xla", "temporary_bytes": 1000, "triton_calls": 0}
    return [theirs, row | {"impl": "tjk", "temporary_bytes": int(1000 * share)} | ours]


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (_unet_rows(1.25, triton_calls=9), []),
        (_unet_rows(1.26, triton_calls=9), ["float32 64 8 train_step are 1.26 of jax_xla's"]),
        (_unet_rows(0.2, triton_calls=0), ["float32 64 8 train_step launches no Triton kernel"]),
        (_unet_rows(0.2, triton_calls=9)[:1], ["not compiled: float32 64 8 train_step of tjk"]),
        (_unet_rows(0.2, triton_calls=9)[1:], ["not compiled: float32 64 8 train_step of tjk"]),
        ([], ["not compiled: a train_step"]),
    ],
)
def test_check_by_share(rows, wrong):
    found = programs.check_share("unet", rows)
    assert len(found) == len(wrong)
    for message, part in zip(found, wrong):
        assert part in message


@pytest.fixture
def compiled(monkeypatch):
    """Replaces the compiling; the list fills with the cases that were asked for."""
    cases = []

    def compile_program(card, case):
        cases.append((card.name, case))
        sizes = dict.fromkeys(("argument_bytes", "output_bytes", "aliased_bytes"), 0)
        memory = (2 if case["impl"] == "tjk" else 3) * 2**20
        traffic = {"row_copies": [], "weight_moves": []}
        row = {"gpu": card.name, "temporary_bytes": memory, "triton_calls": 1, "compile_s": 0.1}
        return {**case, **sizes, **row, **traffic}

    monkeypatch.setattr(programs, "compile_program", compile_program)
    return cases


def test_defaults_are_what_the_check_looks_at(compiled, capsys):
    assert programs.main(["--suite", "moe"]) == 0
    assert {(c["impl"], c["dtype"], c["tokens"], c["op"]) for _, c in compiled} == {
        (impl, dtype, 32768, op)
        for impl in ("tjk", "ragged_dot")
        for dtype in ("float32", "bfloat16")
        for op in ("forward", "train_step")
    }
    assert capsys.readouterr().out.count("train_step") == 4


def test_options_replace_the_defaults(compiled):
    selected = ["--suite", "moe", "--tokens", "64", "--dtype", "bfloat16", "--op", "forward"]
    assert programs.main([*selected, "--implementation", "blocked"]) == 0
    (_, case) = compiled.pop()
    assert not compiled
    assert (case["impl"], case["dtype"], case["tokens"]) == ("blocked", "bfloat16", 64)


def test_cells_are_selected(compiled):
    assert programs.main(["--cell", "lru", "gdn", "--op", "forward", "--tokens", "64"]) == 0
    assert [(c["suite"], c["cell"], c["impl"]) for _, c in compiled] == [
        ("ssm", cell, impl) for cell in ("gdn", "lru") for impl in ("tjk", "jax_xla")
    ]


def test_failed_check_names_card_and_suite(compiled, capsys):
    cards = ["--gpu", "rtx3090", "a100"]
    assert programs.main([*cards, "--suite", "moe", "--op", "train_step", "--check"]) == 1
    failed = capsys.readouterr().err.split("check failed: ")[1:]
    assert len(failed) == 4
    for line, card in zip(failed, ("rtx3090", "rtx3090", "a100", "a100")):
        assert line.startswith(f"{CARDS[card].name}, moe: temporaries of the ")
        assert "are 0.67 of ragged_dot's" in line


def test_every_suite_has_defaults_and_a_check():
    assert programs.DEFAULTS.keys() == programs.CHECKS.keys() == SUITES.keys()


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_target_config_states_the_card(card):
    text = target_config(card)
    capability = re.search(r"cuda_compute_capability { major: (\d+) minor: (\d+) }", text)
    assert int("".join(capability.groups())) == card.capability
    fields = dict(re.findall(r"(\w+): (\S+)", text))
    assert int(fields["core_count"]) == card.cores
    assert int(fields["device_memory_size"]) == card.memory
    assert int(fields["shared_memory_per_block_optin"]) < int(fields["shared_memory_per_core"])


def test_unknown_gpu_is_refused(capsys):
    with pytest.raises(SystemExit):
        programs.main(["--gpu", "rtx9999"])
    assert "invalid choice: 'rtx9999'" in capsys.readouterr().err

"""The parts of `tools.programs` that need no GPU compiler: its verdict, its command line."""

import re

import pytest

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
    found = programs.check(rows)
    assert len(found) == len(wrong)
    for message, part in zip(found, wrong):
        assert part in message


def test_only_our_kernels_count_as_triton_calls():
    hlo = """
      ROOT %a = f32[8] custom-call(%x), custom_call_target="triton_kernel_call"
      %b = f32[8] custom-call(%x), custom_call_target="triton_kernel_call_ffi"
      %c = f32[8] custom-call(%x), custom_call_target="__cublas$gemm"
      %d = f32[8] fusion(%x), kind=kCustom, backend_config={"kind":"__triton_gemm"}
    """
    assert programs.count_triton_calls(hlo) == 2


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

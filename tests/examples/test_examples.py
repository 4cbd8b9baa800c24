"""Each example, at a tiny size: it learns, and ends with a picture."""

import importlib

import jax
import pytest
from matplotlib import image

TINY = {
    "text": ("--width=16", "--blocks=1", "--length=16", "--sample=8", "--batch=4"),
    "diffusion": ("--width=16", "--blocks=1", "--sampling-steps=2", "--batch=8"),
    "copying --model=moe": ("--width=16", "--count=3", "--batch=32"),
    "copying --model=ssm": ("--width=16", "--count=3", "--batch=32", "--cell=lru"),
    "flax_nnx": ("--width=16", "--length=4", "--batch=16"),
    "equinox_module": ("--width=8", "--length=16", "--batch=8"),
}
# What is reached only by learning: without a step these are 6.8, 0.69, 0.11, 0.14, 0.07 and 0.44.
LEARNS = {
    "text": lambda reached: reached["held-out bits"] < 5.5,
    "diffusion": lambda reached: reached["energy distance of samples"] < 0.2,
    "copying --model=moe": lambda reached: reached["right answers"] > 0.5,
    "copying --model=ssm": lambda reached: reached["right answers"] > 0.25,
    "flax_nnx": lambda reached: reached["right values"] > 0.14,
    "equinox_module": lambda reached: reached["error"] < 0.4,
}


@pytest.mark.parametrize("command", TINY)
def test_example(command, tmp_path, capsys):
    name, *arguments = command.split()
    out = tmp_path / "picture.png"
    main = importlib.import_module(f"examples.{name}").main
    with jax.numpy_dtype_promotion("standard"):  # optax is not written for "strict"
        reached = main([*arguments, *TINY[command], "--steps=30", f"--out={out}"])
    assert LEARNS[command](reached), reached
    assert image.imread(out).ndim == 3
    printed = capsys.readouterr().out
    assert all(f"{key}: {value:.3g}" in printed for key, value in reached.items())
    assert str(out) in printed

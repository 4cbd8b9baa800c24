"""What README.md and docs/benchmark.md say is so."""

import re
from pathlib import Path

import bench
from bench.__main__ import _parser
from bench.suites import SUITES

ROOT = Path(bench.__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "benchmark.md").read_text(encoding="utf-8")


def test_readme_examples_run():
    examples = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
    )
    names = {}
    exec(examples[0], names)
    assert names["output"].shape == (2, 128, 4, 64)
    assert names["gradients"]["block_3"]["value"]["weight"].shape == (256, 256)
    exec(examples[1], names)
    assert names["output"].shape == (2, 128, 4, 64)
    exec(examples[2], names)
    assert names["y"].shape == (1024, 64)
    assert names["output"].shape == (1024, 128)
    exec(examples[3], names)
    assert names["y"].shape == (2, 128, 64)
    assert names["token"].shape == (2, 64)
    exec(examples[4], names)
    assert names["y"].shape == (2, 128, 4, 32)
    assert names["token"].shape == (2, 1, 4, 32)
    assert all(len([line for line in e.splitlines() if line]) <= 15 for e in examples)


def test_every_option_is_described():
    options = {o for action in _parser()._actions for o in action.option_strings if "--" in o}
    described = set(re.findall(r"--[a-z][a-z-]+", DOCUMENT.split("## ")[0]))
    assert described == options


def test_every_key_of_a_row_is_described(make_row):
    table = DOCUMENT.split("Keys of a row:")[1].split("\n## ")[0]
    described = {k for line in table.split("\n|") for k in re.findall(r"`(\w+)`", line[:80])}
    for suite in SUITES.values():
        case = dict.fromkeys(("suite", *suite.FIELDS))
        assert {*make_row(case), "error", "skipped"} <= described


def test_every_implementation_is_described():
    section = DOCUMENT.split("## What a row measures")[1].split("\n## ")[0]
    described = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    keys = {suite.KEY for suite in SUITES.values()}
    assert described - keys == {i for suite in SUITES.values() for i in suite.IMPLEMENTATIONS}

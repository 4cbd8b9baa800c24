"""Result files made by hand."""

import json
from pathlib import Path

import bench
from bench.case import Selection
from bench.suites import transformer

SEED_PATH = Path(bench.__file__).parent / "baselines" / "rtx3090_probjax.json"
SEED = json.loads(SEED_PATH.read_text(encoding="utf-8"))


def document_of(rows, **device):
    return {
        "device": {"device_kind": "cpu", "gpu": None, "cpu": "A CPU", **device},
        "config": {},
        "results": rows,
    }


def case_of(**changes):
    """The first case of the transformer's matrix, changed."""
    return {**next(iter(transformer.cases(Selection(full=True)))), **changes}

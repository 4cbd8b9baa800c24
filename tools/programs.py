"""Compiles the suites' programs by XLA's GPU compiler for a card that is not there.

    python -m tools.programs --gpu rtx3090 --suite transformer --tokens 1024 4096

What comes out is what that card would get: the memory a program needs, what it launches. Nothing
is run. It takes jax-cuda13-plugin and jax-cuda13-pjrt of JAX's own version, installed without their
requirements, and no driver: `make programs` sets that up.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tabulate import tabulate
from tqdm import tqdm

from bench.case import DTYPES, OPS, Case, Selection
from bench.step import jitted_step
from bench.suites import SUITES, key, ssm
from tjk import executors
from tools import hlo
from tools.cards import CARDS, Card, target_config

GIB = 2**30

# What is compiled unless the command line says otherwise: what `--check` looks at.
DEFAULTS = {
    "transformer": Selection(
        full=True,
        dtypes=("float32",),
        tokens=(1024, 4096),
        implementations=("tjk", "jax_xla"),
    ),
    "diffusion": Selection(
        full=True,
        dtypes=("float32",),
        tokens=(4096,),
        implementations=("tjk", "jax_xla"),
    ),
    "unet": Selection(full=True, resolutions=(64,)),
    "ssm": Selection(full=True, dtypes=("float32",), implementations=("tjk", "jax_xla")),
    "attention": Selection(
        full=True,
        dtypes=("bfloat16",),
        tokens=(4096,),
        implementations=("tjk", "tjk_flex", "jax_xla"),
    ),
    "moe": Selection(full=True, tokens=(32768,), implementations=("tjk", "ragged_dot")),
}

# What `--check` asks of the transformer's float32 train_step: temporaries at T = 4096, and their
# growth from T = 1024, where memory linear in T would give 4 (of ssm, too).
MAX_TEMPORARIES = 3 * GIB
MAX_GROWTH = 4.2
# Of each state-space cell's float32 train_step: temporaries at L = 4096 in relation to those of
# plain JAX, their growth from L = 1024, and the largest array in units of B L D. A state for every
# position would take 64 (gdn) to 256 units, the hidden layer of the multilayer perceptron takes 4.
MAX_SHARE_SSM = 1 / 3
MAX_LARGEST = 8
# Of the mixture of experts' train_step: temporaries in relation to those of `jax.lax.ragged_dot`.
MAX_SHARE = 0.5
# Of every train_step of the other suites: temporaries in relation to those of plain JAX.
MAX_SHARES = {"diffusion": 1 / 4, "attention": 1 / 20, "unet": 5 / 4}


def compile_program(card: Card, case: Case) -> dict[str, Any]:
    """Compiles one case and returns what the card would need for it, in bytes.

    Raises:
        RuntimeError: XLA's GPU compiler is not installed.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology="1x1x1",
            target_config=target_config(card),
        )
    except NotImplementedError as error:
        raise RuntimeError(
            f"no GPU compiler: jax-cuda13-plugin and jax-cuda13-pjrt {jax.__version__} are needed"
        ) from error
    sharding = SingleDeviceSharding(topology.devices[0])
    problem = SUITES[case["suite"]].problem(case)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (problem.params, *problem.inputs),
    )
    start = time.perf_counter()
    with executors.target(card.capability):
        step = jitted_step(problem.measured, case["op"], problem.learning_rate)
        program = step.lower(*arguments).compile()
    memory, text = program.memory_analysis(), program.as_text()
    return {
        **case,
        "gpu": card.name,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "triton_calls": hlo.count_triton_calls(text),
        "compile_s": time.perf_counter() - start,
        **_traffic(case, text),
    }


def _traffic(case: Case, text: str) -> dict[str, Any]:
    """What the suite's check asks of the instructions.

    Of a mixture of experts the names of those that move what it need not move, of a state-space
    model the largest array in units of one activation, B L D.
    """
    if case["suite"] == "ssm":
        activation = case["batch"] * case["tokens"] * case["model_dim"]
        return {"largest_array": max(hlo.sizes(text)) / activation}
    if case["suite"] != "moe":
        return {}
    slots = case["tokens"] * case["top_k"]
    weights = case["experts"] * case["d_model"] * case["d_hidden"]
    return {
        "row_copies": hlo.producers(text, slots * case["d_model"]),
        "weight_moves": hlo.rearrangements(text, weights),
    }


def check_transformer(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the memory of tjk's float32 train_step; empty if nothing."""
    steps = {
        row["tokens"]: row
        for row in rows
        if (row["suite"], row.get("attention")) == ("transformer", "tjk")
        and (row["dtype"], row["op"]) == ("float32", "train_step")
    }
    if missing := {1024, 4096} - steps.keys():
        return [f"not compiled: the float32 train_step of tjk at T in {sorted(missing)}"]
    short, long = (steps[tokens]["temporary_bytes"] for tokens in (1024, 4096))
    wrong = []
    if long > MAX_TEMPORARIES:
        wrong.append(
            f"temporaries at T=4096 are {long / GIB:.2f} GiB, at most {MAX_TEMPORARIES / GIB:g}"
            " are allowed"
        )
    if long > MAX_GROWTH * short:
        wrong.append(
            f"temporaries grow {long / short:.2f} times from T=1024 to 4096, at most {MAX_GROWTH}"
            " is allowed"
        )
    if not all(row["triton_calls"] for row in steps.values()):
        wrong.append("the train_step of tjk launches no Triton kernel")
    return wrong


def check_moe(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with tjk's train_step of 32768 tokens in either dtype; empty if nothing."""
    steps = {
        (row["impl"], row["dtype"]): row
        for row in rows
        if (row["suite"], row["tokens"], row["op"]) == ("moe", 32768, "train_step")
    }
    wrong = []
    for dtype in DTYPES:
        ours, theirs = (steps.get((impl, dtype)) for impl in ("tjk", "ragged_dot"))
        name = f"the {dtype} train_step of 32768 tokens"
        if ours is None or theirs is None:
            wrong.append(f"not compiled: {name} of tjk and of ragged_dot")
            continue
        share = ours["temporary_bytes"] / theirs["temporary_bytes"]
        if share > MAX_SHARE:
            wrong.append(
                f"temporaries of {name} are {share:.2f} of ragged_dot's, at most {MAX_SHARE} is"
                " allowed"
            )
        if not ours["triton_calls"]:
            wrong.append(f"{name} launches no Triton kernel")
        if copies := ours["row_copies"]:
            wrong.append(f"{name} has arrays of (M k, D): {', '.join(copies)}")
        if moves := ours["weight_moves"]:
            wrong.append(f"{name} rearranges expert weights: {', '.join(moves)}")
    return wrong


def check_ssm(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with tjk's float32 train_step, for each cell; empty if nothing."""
    steps = {
        (row["cell"], row["impl"], row["tokens"]): row
        for row in rows
        if (row["suite"], row["dtype"], row["op"]) == ("ssm", "float32", "train_step")
    }
    wrong = []
    for cell in ssm.CELLS:
        needed = (("tjk", 1024), ("tjk", 4096), ("jax_xla", 4096))
        short, long, theirs = (steps.get((cell, *which)) for which in needed)
        if short is None or long is None or theirs is None:
            wrong.append(f"not compiled: the float32 train_step of {cell}, tjk's and jax_xla's")
            continue
        share = long["temporary_bytes"] / theirs["temporary_bytes"]
        if share > MAX_SHARE_SSM:
            wrong.append(
                f"temporaries of {cell} are {share:.2f} of jax_xla's, at most 1/3 is allowed"
            )
        growth = long["temporary_bytes"] / short["temporary_bytes"]
        if growth > MAX_GROWTH:
            wrong.append(
                f"temporaries of {cell} grow {growth:.2f} times from L=1024 to 4096, at most"
                f" {MAX_GROWTH} is allowed"
            )
        if not long["triton_calls"]:
            wrong.append(f"the train_step of {cell} launches no Triton kernel")
        if (largest := long["largest_array"]) > MAX_LARGEST:
            wrong.append(
                f"the train_step of {cell} has an array of {largest:g} B L D elements, at most"
                f" {MAX_LARGEST} is allowed"
            )
    return wrong


def check_share(suite: str, rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the train_steps of one of `MAX_SHARES`; empty if nothing."""
    implementation, allowed = SUITES[suite].KEY, MAX_SHARES[suite]
    cases: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if (row["suite"], row["op"]) == (suite, "train_step"):
            case = key(row, without=(implementation,))
            cases.setdefault(case, {})[row[implementation]] = row
    wrong = [] if cases else ["not compiled: a train_step"]
    for case, group in cases.items():
        name = " ".join(str(value) for value in case[1:])
        if "jax_xla" not in group or len(group) == 1:
            wrong.append(f"not compiled: {name} of tjk and of jax_xla")
            continue
        theirs = group.pop("jax_xla")
        for ours in group.values():
            share = ours["temporary_bytes"] / theirs["temporary_bytes"]
            if share > allowed:
                wrong.append(
                    f"temporaries of {name} are {share:.2f} of jax_xla's, at most {allowed} is"
                    " allowed"
                )
            if not ours["triton_calls"]:
                wrong.append(f"{name} launches no Triton kernel")
    return wrong


CHECKS = {
    "transformer": check_transformer,
    "ssm": check_ssm,
    "moe": check_moe,
    **{suite: functools.partial(check_share, suite) for suite in MAX_SHARES},
}


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    given = {
        "dtypes": options.dtype,
        "tokens": options.tokens,
        "implementations": options.implementation,
        "cells": options.cell,
    }
    changes = {name: tuple(values) for name, values in given.items() if values}
    for suite in options.suite:
        selection = dataclasses.replace(DEFAULTS[suite], **changes)
        yield from (c for c in SUITES[suite].cases(selection) if c["op"] in options.op)


def _table(rows: list[dict[str, Any]]) -> str:
    return tabulate(
        [
            {
                "gpu": row["gpu"],
                "suite": " ".join((row["suite"], row.get("cell", ""))),
                "implementation": row[SUITES[row["suite"]].KEY],
                "dtype": row["dtype"],
                "size": row.get("tokens", row.get("resolution")),
                "op": row["op"],
                "temporary GiB": row["temporary_bytes"] / GIB,
                "argument GiB": row["argument_bytes"] / GIB,
                "output GiB": row["output_bytes"] / GIB,
                "Triton calls": row["triton_calls"],
                "compile s": row["compile_s"],
            }
            for row in rows
        ],
        headers="keys",
        floatfmt=".3f",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.programs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gpu", nargs="+", choices=CARDS, default=["rtx3090"])
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--implementation", nargs="+", help="default: ours and one of JAX's")
    parser.add_argument("--cell", nargs="+", choices=ssm.CELLS, help="of the ssm suite")
    parser.add_argument("--tokens", nargs="+", type=int, help="default: what --check looks at")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: likewise")
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail unless the train_step of tjk, as by default, needs little enough memory",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Compiles what the command line selects, prints the table, returns the exit status."""
    options = _parser().parse_args(arguments)
    # The compiler is there without it; JAX would look for a card first and complain.
    jax.config.update("jax_platforms", "cpu")
    programs = [(gpu, case) for gpu in options.gpu for case in _cases(options)]
    rows = [compile_program(CARDS[gpu], case) for gpu, case in tqdm(programs, unit="program")]
    print(_table(rows))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    wrong = [
        f"{CARDS[gpu].name}, {suite}: {line}"
        for gpu in options.gpu
        for suite in options.suite
        for line in CHECKS[suite]([row for row in rows if row["gpu"] == CARDS[gpu].name])
        if options.check
    ]
    for line in wrong:
        print(f"check failed: {line}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

"""The suites by name. A suite is a module with

KEY             the row's key that names the implementation
FIELDS          the row's keys, besides suite, that say what is measured, in order
IMPLEMENTATIONS the values of KEY, ours first
cases(selection) -> iterator of cases
unavailable(case, platform) -> why the case cannot exist on that platform, or None
problem(case) -> the model with its parameters, inputs and references
"""

from types import ModuleType

from bench.case import Case
from bench.suites import attention, diffusion, moe, ssm, transformer, unet

SUITES: dict[str, ModuleType] = {
    "transformer": transformer,
    "diffusion": diffusion,
    "moe": moe,
    "ssm": ssm,
    "unet": unet,
    "attention": attention,
}


def key(row: Case, without: tuple[str, ...] = ()) -> tuple:
    """The values that identify a row's case, or, without some of the keys, a group of cases."""
    fields = ("suite", *SUITES[row["suite"]].FIELDS)
    return tuple(row[field] for field in fields if field not in without)

"""The rows of the suites whose implementations differ in the attention: transformer, diffusion."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from jax import Array

from bench.case import DTYPES, OPS, Case, Selection
from tjk.nn.layers import Implementation
from tjk.ops import flex_attention
from tjk.ops.attention import reference

KEY = "attention"
FIELDS = ("attention", "dtype", "tokens", "batch", "model_dim", "op")
IMPLEMENTATIONS = ("tjk", "tjk_flex", "jax_xla", "jax_cudnn")

# Everything, which is for GPUs.
FULL = {256: OPS, 1024: OPS, 4096: OPS}
BATCH = 8
MODEL_DIM = 256
HEAD_WIDTH = 64


def cases(suite: str, selection: Selection, quick: Mapping[int, tuple[str, ...]]) -> Iterator[Case]:
    """The selected part of the matrix, in the order of the seed's file.

    Args:
        suite: its name.
        selection: what is asked for; none of these suites by cell or resolution.
        quick: the lengths that take minutes on two CPU cores, and what is run at each.
    """
    if selection.cells or selection.resolutions:
        return
    lengths = dict.fromkeys(selection.tokens, OPS) or (FULL if selection.full else quick)
    for dtype, (tokens, ops), batch, model_dim, attention in product(
        selection.dtypes or DTYPES,
        lengths.items(),
        selection.batch or (BATCH,),
        selection.model_dim or (MODEL_DIM,),
        [i for i in IMPLEMENTATIONS if i in (selection.implementations or IMPLEMENTATIONS)],
    ):
        if attention == "jax_cudnn" and dtype == "float32":
            continue  # cuDNN's attention takes 16-bit operands only
        for op in ops:
            if not selection.takes(dtype, op):
                continue
            yield {
                "suite": suite,
                "attention": attention,
                "dtype": dtype,
                "tokens": tokens,
                "batch": batch,
                "model_dim": model_dim,
                "op": op,
            }


def unavailable(case: Case, platform: str) -> str | None:
    """Why the case cannot exist on that platform, or None."""
    if case["attention"] == "jax_cudnn" and platform != "gpu":
        return f"cuDNN needs an NVIDIA GPU, the platform is {platform}"
    return None


def implementation(case: Case) -> Implementation:
    """The case's attention, as `tjk.nn` takes it."""
    return {"tjk": None, "tjk_flex": _flex}.get(case["attention"], case["attention"])


def core(width: int) -> dict[str, Any]:
    """Sizes of a transformer that wide, with as many heads of at least 64 as divide the width."""
    heads = next(n for n in range(max(1, width // HEAD_WIDTH), 0, -1) if width % n == 0)
    return {"width": width, "heads": heads, "mlp_width": 4 * width}


def definition(query: Array, key: Array, value: Array) -> Array:
    """Unmasked attention by its definition."""
    scale = query.shape[-1] ** -0.5
    everything = (None, None, None, None)  # no bias, no mask, no lengths
    window = (None, None)
    return reference.attention(query, key, value, *everything, scale=scale, window=window)[0]


def _flex(query: Array, key: Array, value: Array) -> Array:
    """A score and a mask that change nothing, of which the kernel does not know that."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx >= 0

    return flex_attention(query, key, value, score_mod=score_mod, mask_mod=mask_mod)

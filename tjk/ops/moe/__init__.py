"""The expert layer of a mixture of experts: `tjk.ops.moe_mlp`."""

from tjk.ops.moe.api import moe_mlp

__all__ = ["moe_mlp"]

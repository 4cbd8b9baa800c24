"""Flash attention: `tjk.ops.flash_attention`, and `tjk.ops.flex_attention` with functions in it."""

from tjk.ops.attention.api import flash_attention
from tjk.ops.attention.flex import flex_attention

__all__ = ["flash_attention", "flex_attention"]

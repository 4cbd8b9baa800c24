"""Flash attention: `tjk.ops.flash_attention`."""

from tjk.ops.attention.api import flash_attention

__all__ = ["flash_attention"]

"""The public operations."""

from tjk.ops.attention import flash_attention

__all__ = ["flash_attention"]

"""Attention of new tokens over a cache of keys and values: `tjk.ops.decode_attention`."""

from tjk.ops.decode.api import decode_attention

__all__ = ["decode_attention"]

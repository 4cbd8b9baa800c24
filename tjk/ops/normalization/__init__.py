"""Normalization of images by groups of channels."""

from tjk.ops.normalization.api import group_norm

__all__ = ["group_norm"]

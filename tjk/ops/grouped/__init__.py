"""Grouped matrix product: `tjk.ops.grouped_matmul`."""

from tjk.ops.grouped.api import grouped_matmul

__all__ = ["grouped_matmul"]

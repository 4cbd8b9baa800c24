"""Products of groups of rows with a matrix for each group."""

from kernels_triton.grouped.matmul import grouped_matmul
from kernels_triton.grouped.outer import grouped_outer

__all__ = ["grouped_matmul", "grouped_outer"]

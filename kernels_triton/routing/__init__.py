"""Routing of tokens to experts: the choice of experts, and the sort of slots by expert."""

from kernels_triton.routing.sort import expert_histogram, expert_prefix, expert_scatter
from kernels_triton.routing.top_k import top_k_backward, top_k_forward

__all__ = [
    "expert_histogram",
    "expert_prefix",
    "expert_scatter",
    "top_k_backward",
    "top_k_forward",
]

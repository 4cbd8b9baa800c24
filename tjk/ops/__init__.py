"""The public operations."""

from tjk.ops.attention import flash_attention
from tjk.ops.grouped import grouped_matmul
from tjk.ops.moe import moe_mlp
from tjk.ops.routing import (
    ExpertOrder,
    load_balance_loss,
    route_top_k,
    router_z_loss,
    sort_by_expert,
)

__all__ = [
    "ExpertOrder",
    "flash_attention",
    "grouped_matmul",
    "load_balance_loss",
    "moe_mlp",
    "route_top_k",
    "router_z_loss",
    "sort_by_expert",
]

"""Routing of tokens to experts."""

from tjk.ops.routing.api import route_top_k, sort_by_expert
from tjk.ops.routing.losses import load_balance_loss, router_z_loss
from tjk.ops.routing.order import ExpertOrder

__all__ = [
    "ExpertOrder",
    "load_balance_loss",
    "route_top_k",
    "router_z_loss",
    "sort_by_expert",
]

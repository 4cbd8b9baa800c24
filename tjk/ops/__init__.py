"""The public operations."""

from tjk.ops import masks
from tjk.ops.attention import flash_attention, flex_attention
from tjk.ops.convolution import causal_conv1d, causal_conv1d_step
from tjk.ops.decode import decode_attention
from tjk.ops.delta_rule import gated_delta_rule, gated_delta_rule_step
from tjk.ops.grouped import grouped_matmul
from tjk.ops.linear import linear_scan, linear_scan_step
from tjk.ops.moe import moe_mlp
from tjk.ops.normalization import group_norm
from tjk.ops.routing import (
    ExpertOrder,
    load_balance_loss,
    route_top_k,
    router_z_loss,
    sort_by_expert,
)
from tjk.ops.selective import selective_scan, selective_scan_step
from tjk.ops.ssd import ssd_scan, ssd_scan_step

__all__ = [
    "ExpertOrder",
    "causal_conv1d",
    "causal_conv1d_step",
    "decode_attention",
    "flash_attention",
    "flex_attention",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "group_norm",
    "grouped_matmul",
    "linear_scan",
    "linear_scan_step",
    "load_balance_loss",
    "masks",
    "moe_mlp",
    "route_top_k",
    "router_z_loss",
    "selective_scan",
    "selective_scan_step",
    "sort_by_expert",
    "ssd_scan",
    "ssd_scan_step",
]

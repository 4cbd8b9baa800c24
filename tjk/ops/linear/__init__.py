"""The linear recurrence h_t = a_t h_{t-1} + x_t, real or complex."""

from tjk.ops.linear.api import linear_scan
from tjk.ops.linear.step import linear_scan_step

__all__ = ["linear_scan", "linear_scan_step"]

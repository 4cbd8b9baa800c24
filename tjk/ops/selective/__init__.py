"""The selective scan of Mamba: `tjk.ops.selective_scan` and its single step."""

from tjk.ops.selective.api import selective_scan
from tjk.ops.selective.step import selective_scan_step

__all__ = ["selective_scan", "selective_scan_step"]

"""The scan of Mamba-2 (state-space duality): `tjk.ops.ssd_scan` and `ssd_scan_step`."""

from tjk.ops.ssd.api import ssd_scan
from tjk.ops.ssd.step import ssd_scan_step

__all__ = ["ssd_scan", "ssd_scan_step"]

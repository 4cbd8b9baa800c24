"""The gated delta rule: `tjk.ops.gated_delta_rule` and its step for one token."""

from tjk.ops.delta_rule.api import gated_delta_rule
from tjk.ops.delta_rule.step import gated_delta_rule_step

__all__ = ["gated_delta_rule", "gated_delta_rule_step"]

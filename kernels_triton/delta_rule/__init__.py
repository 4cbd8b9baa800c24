"""Kernels of the gated delta rule."""

from kernels_triton.delta_rule.backward import delta_rule_d_states, delta_rule_gradients
from kernels_triton.delta_rule.forward import delta_rule_compose, delta_rule_outputs
from kernels_triton.delta_rule.states import delta_rule_states

__all__ = [
    "delta_rule_compose",
    "delta_rule_d_states",
    "delta_rule_gradients",
    "delta_rule_outputs",
    "delta_rule_states",
]

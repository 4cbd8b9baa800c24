"""The causal convolution along time of each channel by itself."""

from tjk.ops.convolution.api import causal_conv1d
from tjk.ops.convolution.step import causal_conv1d_step

__all__ = ["causal_conv1d", "causal_conv1d_step"]

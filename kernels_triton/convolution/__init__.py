"""The causal convolution along time of each channel by itself."""

from kernels_triton.convolution.backward import convolution_backward
from kernels_triton.convolution.forward import convolution_forward

__all__ = ["convolution_backward", "convolution_forward"]

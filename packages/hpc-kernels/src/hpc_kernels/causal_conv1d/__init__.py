"""Depthwise causal convolution with a history of the columns before the first one, then SiLU."""

from hpc_kernels.causal_conv1d.prefill import causal_conv1d
from hpc_kernels.causal_conv1d.reference import causal_conv1d_reference
from hpc_kernels.causal_conv1d.update import causal_conv1d_step

__all__ = ["causal_conv1d", "causal_conv1d_reference", "causal_conv1d_step"]

"""Root-mean-square norms."""

from hpc_kernels.rms_norm.norm import gated_rms_norm, l2_norm, rms_norm
from hpc_kernels.rms_norm.reference import rms_norm_reference

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm", "rms_norm_reference"]

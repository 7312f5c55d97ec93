"""The gated activation of feed-forward blocks."""

from hpc_kernels.swiglu.gate import swiglu
from hpc_kernels.swiglu.reference import swiglu_reference

__all__ = ["swiglu", "swiglu_reference"]

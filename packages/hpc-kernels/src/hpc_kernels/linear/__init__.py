"""Dense projections."""

from hpc_kernels.linear.gemm import Gemm, linear, select_gemm

__all__ = ["Gemm", "linear", "select_gemm"]

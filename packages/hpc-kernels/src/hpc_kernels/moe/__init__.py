"""Routed experts."""

from hpc_kernels.moe.grouped import check_experts, grouped_experts
from hpc_kernels.moe.reference import experts_reference
from hpc_kernels.moe.router import route

__all__ = ["check_experts", "experts_reference", "grouped_experts", "route"]

"""Routed experts."""

from hpc_kernels.moe.gathered import GATHERED_TOKENS, gathered_experts
from hpc_kernels.moe.grouped import check_experts, grouped_experts
from hpc_kernels.moe.reference import experts_reference
from hpc_kernels.moe.router import route

__all__ = [
    "GATHERED_TOKENS",
    "check_experts",
    "experts_reference",
    "gathered_experts",
    "grouped_experts",
    "route",
]

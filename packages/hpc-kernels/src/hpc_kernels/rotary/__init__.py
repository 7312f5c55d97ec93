"""Rotary position embedding of the first part of each head."""

from hpc_kernels.rotary.reference import rotary_reference
from hpc_kernels.rotary.rotate import apply_rotary, inverse_frequencies, rotary_table

__all__ = ["apply_rotary", "inverse_frequencies", "rotary_reference", "rotary_table"]

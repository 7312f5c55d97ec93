"""Attention over KV pages: causal for many tokens of one lane, and one token for each of B lanes."""

from hpc_kernels.paged_attention.decode import paged_decode
from hpc_kernels.paged_attention.gather import PageRow, page_row
from hpc_kernels.paged_attention.prefill import paged_prefill
from hpc_kernels.paged_attention.reference import paged_attention_reference

__all__ = ["PageRow", "page_row", "paged_attention_reference", "paged_decode", "paged_prefill"]

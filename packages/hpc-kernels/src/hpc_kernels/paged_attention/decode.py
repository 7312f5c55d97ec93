"""Attention of one token for each of B lanes, each over its own pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpc_kernels.paged_attention.gather import PageRow, gather

__all__ = ["paged_decode"]


def paged_decode(
    q: torch.Tensor, pages: torch.Tensor, rows: Sequence[PageRow], lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """[B, HQ, D] in the dtype of q: lane b attends positions [0, lengths[b]).

    q: [B, HQ, D]. pages: [P, block, 2, HK, D], the tokens' own keys and values appended already. rows[b]:
    of ceil(lengths[b] / block) pages. One lane at a time, so that a lane's bits are its own.
    """
    B, HQ, D = q.shape
    HK = pages.shape[3]
    out = torch.empty_like(q)
    grouped = (q * scale).view(B, HK, HQ // HK, D)
    for lane, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        key, value = gather(pages, row, length, q.dtype)
        scores = torch.bmm(grouped[lane], key.permute(1, 2, 0))
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        torch.bmm(weights, value.transpose(0, 1), out=out[lane].view(HK, HQ // HK, D))
    return out

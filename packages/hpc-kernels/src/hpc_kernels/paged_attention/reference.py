"""Attention's definition over pages: one query at a time over the keys at or before it, in FP64."""

from __future__ import annotations

import torch

__all__ = ["paged_attention_reference"]


def paged_attention_reference(
    q: torch.Tensor, pages: torch.Tensor, row: torch.Tensor, base: int, scale: float
) -> torch.Tensor:
    """FP64 [T, HQ, D]: query t at position base + t attends positions [0, base + t].

    q: [T, HQ, D]. pages: [P, block, 2, HK, D], keys then values. row: int64, page of every block up to the
    last query's. Query head h reads key head h // (HQ / HK).
    """
    group = q.shape[1] // pages.shape[3]
    cells = pages[row].flatten(0, 1).double().repeat_interleave(group, dim=2)
    key, value = cells.unbind(1)
    out = torch.empty(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        end = base + t + 1
        scores = torch.einsum("hd,shd->hs", q[t].double(), key[:end]) * scale
        out[t] = torch.einsum("hs,shd->hd", torch.softmax(scores, -1), value[:end])
    return out

"""Appending one token at a time, page and column spelled out."""

from __future__ import annotations

import torch

__all__ = ["kv_append_reference"]


def kv_append_reference(
    pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: list[int], base: int
) -> None:
    """Write key and value [T, HK, D] of positions base.. into pages [P, block, 2, HK, D], in place.

    row[b] is the page of block b.
    """
    block = pages.shape[1]
    for t in range(key.shape[0]):
        page, column = row[(base + t) // block], (base + t) % block
        pages[page, column, 0] = key[t].to(pages.dtype)
        pages[page, column, 1] = value[t].to(pages.dtype)

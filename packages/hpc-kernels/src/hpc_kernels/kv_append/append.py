"""Appending many tokens at once, by their cells: page * block + column."""

from __future__ import annotations

import torch

__all__ = ["kv_append"]


def kv_append(pages: torch.Tensor, key_value: torch.Tensor, cells: torch.Tensor) -> None:
    """Write key_value [T, 2, HK, D] into the cells of pages [P, block, 2, HK, D], rounded to their dtype.

    cells: int64 [T], all different, page * block + column.
    """
    pages.flatten(0, 1).index_copy_(0, cells, key_value.to(pages.dtype))

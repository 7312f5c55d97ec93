"""Keys and values of one lane, gathered from its pages into one contiguous run."""

from __future__ import annotations

import torch

__all__ = ["gather"]


def gather(
    pages: torch.Tensor, row: torch.Tensor, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values) of positions [0, length), [length, HK, D] views of one gathered copy, in `dtype`.

    pages: [P, block, 2, HK, D]; row: int64 [ceil(length / block)]. A page is token-major, so gathered pages
    read as one run without a second copy.
    """
    cells = pages.index_select(0, row).flatten(0, 1)[:length].to(dtype)
    key, value = cells.unbind(1)
    return key, value

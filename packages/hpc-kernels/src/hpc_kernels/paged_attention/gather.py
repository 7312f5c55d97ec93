"""Keys and values of one lane as one run: gathered from its pages, or where they lie if those are a run."""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["PageRow", "gather", "page_row"]

PageRow: TypeAlias = torch.Tensor | slice
"""The pages of blocks 0, 1, ...: int64 ids, or a slice of the pool's pages if their ids are consecutive."""


def page_row(row: torch.Tensor) -> PageRow:
    """The row as a slice if it can be one; int64 [n], n >= 1.

    Rows on a GPU stay as they are: looking at them would wait for the device. Pages of a slice are read
    where they lie; their bytes, strides and alignment are those of a gathered copy, and so are the results.
    """
    if row.device.type != "cpu":
        return row
    first, count = int(row[0]), row.shape[0]
    run = torch.arange(first, first + count)
    return slice(first, first + count) if torch.equal(row, run) else row


def gather(
    pages: torch.Tensor, row: PageRow, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values) of positions [0, length), each [length, HK, D] in `dtype`: read only, may be the pages.

    pages: [P, block, 2, HK, D]; row: ceil(length / block) pages. A page is token-major, so that pages read
    as one run without a second copy.
    """
    own = pages[row] if isinstance(row, slice) else pages.index_select(0, row)
    key, value = own.flatten(0, 1)[:length].to(dtype).unbind(1)
    return key, value

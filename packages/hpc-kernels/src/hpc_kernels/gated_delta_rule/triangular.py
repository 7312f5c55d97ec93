"""The inverse of I + A for strictly lower triangular A: what couples the writes inside a chunk."""

from __future__ import annotations

import torch

__all__ = ["inverse_unit_lower"]

_BASE = 16  # rows inverted by forward substitution before blocks are merged


def inverse_unit_lower(a: torch.Tensor) -> torch.Tensor:
    """inv(I + tril(a, -1)), same shape [N, n, n] and dtype; n is a power of two. Upper part of `a`: ignored.

    Forward substitution inside diagonal blocks of 16 rows, all blocks of all matrices at once, then merges
    of neighbours: inv([[P, 0], [B, Q]]) = [[P', 0], [-Q' B P', Q']]. A power series would need the powers
    of A, which run into denormals and cancel; this is exact substitution.
    """
    N, n, _ = a.shape
    size = min(_BASE, n)
    blocks = n // size
    # [N, blocks, blocks, size, size]; the diagonal ones are inverted row by row.
    tiles = a.view(N, blocks, size, blocks, size).transpose(2, 3)
    diagonal = torch.diagonal(tiles, dim1=1, dim2=2).permute(0, 3, 1, 2)
    inverse = torch.eye(size, dtype=a.dtype, device=a.device).repeat(N, blocks, 1, 1)
    for i in range(1, size):
        row = diagonal[:, :, i : i + 1, :i]
        inverse[:, :, i : i + 1, :i] = -(row @ inverse[:, :, :i, :i])
    while size < n:
        blocks //= 2
        below = a.view(N, blocks, 2, size, blocks, 2, size)[:, :, 1, :, :, 0]
        below = torch.diagonal(below, dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(N * blocks, size, size)
        first, second = inverse.view(N * blocks, 2, size, size).unbind(1)
        merged = a.new_zeros(N, blocks, 2 * size, 2 * size)
        flat = merged.view(N * blocks, 2 * size, 2 * size)
        flat[:, :size, :size] = first
        flat[:, size:, size:] = second
        flat[:, size:, :size] = torch.bmm(second, torch.bmm(below, first)).neg_()
        inverse, size = merged, 2 * size
    return inverse.view(N, n, n)

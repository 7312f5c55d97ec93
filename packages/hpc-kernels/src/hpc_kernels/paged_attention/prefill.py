"""Causal attention of a prefill chunk over its cached prefix and itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

from hpc_kernels.paged_attention.gather import PageRow, gather

__all__ = ["paged_prefill"]

_ROWS = 256  # queries of one call: bounds the mask, and wastes at most that many keys above the diagonal


def paged_prefill(
    q: torch.Tensor, pages: torch.Tensor, row: PageRow, base: int, scale: float
) -> torch.Tensor:
    """[T, HQ, D] in the dtype of q: query t at position base + t attends positions [0, base + t].

    q: [T, HQ, D]. pages: [P, block, 2, HK, D], the chunk's own keys and values appended already. row: of
    ceil((base + T) / block) pages. Query head h reads key head h // (HQ / HK).
    """
    T = q.shape[0]
    length = base + T
    key, value = (x.transpose(0, 1).unsqueeze(0) for x in gather(pages, row, length, q.dtype))
    if T == 1:
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0), key, value, scale=scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)
    rows = min(T, _ROWS)
    # Aligned to the lower right: the last column is the last query of a block, earlier keys are open.
    mask = q.new_zeros(rows, length)
    mask[:, length - rows :] = q.new_full((rows, rows), -torch.inf).triu_(1)
    out = torch.empty_like(q)
    for begin in range(0, T, rows):
        n = min(rows, T - begin)
        end = base + begin + n
        attended = F.scaled_dot_product_attention(
            q[begin : begin + n].transpose(0, 1).unsqueeze(0),
            key[:, :, :end],
            value[:, :, :end],
            attn_mask=mask[rows - n :, length - end :],
            scale=scale,
            enable_gqa=True,
        )
        out[begin : begin + n] = attended.squeeze(0).transpose(0, 1)
    return out

"""The causal convolution of many tokens of one lane."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

__all__ = ["causal_conv1d"]


def causal_conv1d(x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of the convolution, FP32 [T, C]; `history` becomes the last W - 1 raw columns, in place.

    x: [T, C]; history: [W - 1, C], oldest first, of the dtype in which x is kept. weight: FP32 [W, C], last
    row for the current column. Token-major shifted sums: projections come token-major, and transposing them
    for a library convolution costs more than the sums.
    """
    T, W = x.shape[0], weight.shape[0]
    columns = torch.cat((history, x))
    history.copy_(columns[T:])
    columns = columns.float()
    out = columns[W - 1 :] * weight[W - 1]
    for tap in range(W - 1):
        out.addcmul_(columns[tap : tap + T], weight[tap])
    return F.silu(out, inplace=True)

"""The convolution as its definition says it, one token and one tap at a time."""

from __future__ import annotations

import torch

__all__ = ["causal_conv1d_reference"]


def causal_conv1d_reference(
    x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(SiLU of the convolution [T, C], the history after it [W - 1, C]), in the dtype of x.

    x: [T, C]. history: [W - 1, C], the raw columns before x, oldest first; zeros before the first token.
    weight: [W, C]; its last row multiplies the current column.
    """
    W = weight.shape[0]
    columns = torch.cat((history.to(x.dtype), x))
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for tap in range(W):
            out[t] += columns[t + tap] * weight[tap].to(x.dtype)
    return out * torch.sigmoid(out), columns[columns.shape[0] - (W - 1) :]

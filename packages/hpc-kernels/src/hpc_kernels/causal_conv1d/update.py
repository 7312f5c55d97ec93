"""The causal convolution of one token a lane, moving B histories one column on."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

__all__ = ["causal_conv1d_step"]


def causal_conv1d_step(x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of the convolution of one column a lane, FP32 [B, C]; `history` moves on in place.

    x: [B, C]; history: [B, W - 1, C], oldest first, of the dtype in which x is kept; weight: FP32 [W, C].
    """
    columns = torch.cat((history, x.unsqueeze(1)), dim=1)
    history.copy_(columns[:, 1:])
    return F.silu((columns.float() * weight).sum(1), inplace=True)

"""Decay and write strength of every token and value head, from the two small projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

__all__ = ["gates"]


def gates(
    b: torch.Tensor, a: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, beta), both FP32 [T, HV]: g = decay * softplus(a + dt_bias) in log space, beta = sigmoid(b).

    b, a: [T, HV] of any float type, widened before any arithmetic. decay, dt_bias: FP32 [HV], where
    decay = -exp(A_log) < 0, so that g <= 0.
    """
    return F.softplus(a.float() + dt_bias) * decay, torch.sigmoid(b.float())

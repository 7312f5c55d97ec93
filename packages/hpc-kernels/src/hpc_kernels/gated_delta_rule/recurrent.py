"""One decode step of the gated delta rule for B lanes, updating their states in place."""

from __future__ import annotations

import torch

__all__ = ["step_gated_delta_rule"]


def step_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Outputs FP32 [B, HV, V] of one token a lane; `state` FP32 [B, HV, K, V] moves one token on, in place.

    q, k: FP32 [B, HK, K]; v: FP32 [B, HV, V]; g, beta: FP32 [B, HV], as in the reference. Sums, not matrix
    products, so that a lane's bits do not depend on the other lanes' content.
    """
    B, HK, K = k.shape
    HV, V = v.shape[1:]
    # A group of value heads shares its key head by broadcasting: S is [B, HK, HV / HK, K, V] here.
    S = state.view(B, HK, HV // HK, K, V)
    k_column = k.view(B, HK, 1, K, 1)
    S.mul_(torch.exp(g).view(B, HK, -1, 1, 1))
    u = (v.view(B, HK, -1, V) - (S * k_column).sum(-2)).mul_(beta.view(B, HK, -1, 1))
    S.addcmul_(k_column, u.unsqueeze(-2))
    return (S * q.view(B, HK, 1, K, 1)).sum(-2).view(B, HV, V)

"""Norms over the last dimension, computed in FP32 and cast after the multiplication by the weight.

Weights arrive as they multiply: a model whose norms scale by 1 + w passes 1 + w.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm x / sqrt(mean(x^2) + eps) * weight, [..., D] in the dtype of x.

    weight: FP32, broadcast against x: a weight [H, D] norms each head of [T, H, D] with its own row.
    """
    wide = x.float()
    mean = wide.square().sum(-1, keepdim=True).mul_(1.0 / x.shape[-1])
    scale = torch.rsqrt(mean.add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype)


def l2_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm x / sqrt(sum(x^2) + eps) * scale, FP32 [..., D].

    x, scale: FP32; scale broadcasts against [..., 1].
    """
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).add_(eps)).mul_(scale)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm rms_norm(x) * SiLU(gate), [..., D] in the dtype of gate. x, weight: FP32."""
    return rms_norm(x, weight, eps).mul_(F.silu(gate.float())).to(gate.dtype)

"""The norm's definition, in the widest precision."""

from __future__ import annotations

import torch

__all__ = ["rms_norm_reference"]


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm x / sqrt(mean(x^2) + eps) * weight over the last dimension, in FP64."""
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()

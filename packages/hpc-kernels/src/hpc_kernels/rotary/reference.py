"""The rotation's definition: every pair of dimensions turned as a complex number, in FP64."""

from __future__ import annotations

import torch

__all__ = ["rotary_reference"]


def rotary_reference(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int, theta: float) -> torch.Tensor:
    """FP64 [T, H, D]: dimensions (i, i + rotary_dim / 2) turned by positions * theta^(-2 i / rotary_dim).

    x: [T, H, D], positions: [T]. Dimensions from rotary_dim on stay.
    """
    half = rotary_dim // 2
    wide = x.double().clone()
    exponent = torch.arange(half, dtype=torch.float64) * (-2.0 / rotary_dim)
    angle = positions.double()[:, None] * theta**exponent
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pair = torch.complex(wide[..., :half], wide[..., half:rotary_dim]) * turn
    wide[..., :half], wide[..., half:rotary_dim] = pair.real, pair.imag
    return wide

"""Partial rotary embedding in split-half order, with one table for all layers of a forward pass."""

from __future__ import annotations

import torch

__all__ = ["apply_rotary", "inverse_frequencies", "rotary_table"]


def inverse_frequencies(rotary_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """FP32 [rotary_dim / 2]: theta^(-2 i / rotary_dim), rounded as the published models were trained."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return 1.0 / (theta**exponent)


def rotary_table(positions: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), FP32 [T, 1, rotary_dim / 2] each, for integer positions [T]."""
    angle = (positions.float().unsqueeze(-1) * inverse).unsqueeze(1)
    return angle.cos(), angle.sin()


def apply_rotary(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn x [T, H, D] in place and return it; the dimensions beyond the table's pass through."""
    cos, sin = table
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    first.copy_(turned_first)
    second.copy_(turned_second)
    return x

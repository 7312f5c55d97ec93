"""How far an operator may be from its reference."""

from __future__ import annotations

import torch

__all__ = ["TOLERANCE", "error_ratio"]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Largest error ratio by compute dtype: rounding of the operands, not of a wrong formula."""


def error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the error over that of the expected values, in FP64. NaN if either has one."""
    wide, reference = actual.double(), expected.double()
    error = (wide - reference).square().mean().sqrt()
    return float(error / reference.square().mean().sqrt().clamp_min(1e-30))

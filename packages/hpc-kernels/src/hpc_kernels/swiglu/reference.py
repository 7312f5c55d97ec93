"""The activation's definition, in FP64."""

from __future__ import annotations

import torch

__all__ = ["swiglu_reference"]


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """FP64 [T, I]: gate / (1 + exp(-gate)) * up, for gate_up [T, 2 I] with the gate columns first."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up

"""SiLU(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

__all__ = ["swiglu"]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, I] in the dtype of gate_up [T, 2 I], whose gate columns come first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)

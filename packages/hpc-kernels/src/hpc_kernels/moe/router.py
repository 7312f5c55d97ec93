"""Which experts a token goes to, and how much each counts."""

from __future__ import annotations

import torch

__all__ = ["route"]


def route(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert ids int64 [T, top], weights FP32 [T, top] that sum to 1) of router logits [T, E].

    Softmax over all experts in FP32, then the `top` largest, scaled to sum to 1.
    """
    weights, experts = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), top, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True)

"""Routed experts, one token and one expert at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

__all__ = ["experts_reference"]


def experts_reference(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """[T, H] in the dtype of x: sum over a token's experts of weight * down(SiLU(gate x) * up x).

    x: [T, H]; experts, weights: [T, top]; gate_up: [E, 2 I, H], gate rows first; down: [E, H, I].
    """
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for expert, weight in zip(experts[t].tolist(), weights[t], strict=True):
            gate, up = (gate_up[expert] @ x[t]).chunk(2)
            out[t] += weight.to(x.dtype) * (down[expert] @ (F.silu(gate) * up))
    return out

"""Routed experts for a few tokens: each token's expert weights gathered, one small product for each."""

from __future__ import annotations

import torch

from hpc_kernels.swiglu.gate import swiglu

__all__ = ["GATHERED_TOKENS", "gathered_experts"]

GATHERED_TOKENS = 8
"""Up to so many tokens this form reads hardly more weights than the grouped one."""


def gathered_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """[T, H] in the dtype of x, as the reference. Shapes as in the grouped form.

    The products' shapes depend on T alone, so that a token's bits do not depend on where others are routed.
    """
    T, top = experts.shape
    flat = experts.flatten()
    rows = x.repeat_interleave(top, dim=0).unsqueeze(-1)
    inner = swiglu(torch.bmm(gate_up.index_select(0, flat), rows).squeeze(-1))
    outer = torch.bmm(down.index_select(0, flat), inner.unsqueeze(-1)).view(T, top, -1)
    return (outer.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)

"""Routed experts as one grouped matrix product per projection, tokens sorted by expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

from hpc_kernels.swiglu.gate import swiglu

__all__ = ["check_experts", "grouped_experts"]

_ALIGN = 16  # bytes: grouped_mm wants every row of every operand to start on such a boundary


def check_experts(dtype: torch.dtype, hidden: int, intermediate: int) -> None:
    """Can grouped_experts run experts of these sizes?

    Raises:
        ValueError: grouped_mm knows no such dtype, or a row is not a multiple of 16 bytes.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"experts in {dtype}: grouped products are there for bfloat16 and float32")
    for name, size in (("hidden size", hidden), ("expert intermediate size", intermediate)):
        if size * dtype.itemsize % _ALIGN:
            raise ValueError(
                f"experts in {dtype}: {name} {size} is not a multiple of {_ALIGN // dtype.itemsize}"
            )


def grouped_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """[T, H] in the dtype of x, as the reference. Deterministic: a token's experts are summed in its order.

    x: [T, H]; experts: int64 [T, top]; weights: FP32 [T, top]; gate_up: [E, 2 I, H]; down: [E, H, I].
    """
    T, top = experts.shape
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=gate_up.shape[0]).cumsum(0).to(torch.int32)
    rows = x.index_select(0, order // top)
    inner = swiglu(F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends))
    outer = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    by_token = torch.empty_like(outer).index_copy_(0, order, outer).view(T, top, -1)
    return (by_token.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)

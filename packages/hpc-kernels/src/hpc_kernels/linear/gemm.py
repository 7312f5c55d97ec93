"""x W^T by the library that suits the device and the number of rows."""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

__all__ = ["Gemm", "linear", "select_gemm"]

_ONEDNN_ROWS = 64  # below, copying x and W into the library's own tensors costs more than it saves


class Gemm(enum.Enum):
    """Who multiplies. Chosen once, when a model is built."""

    TORCH = "torch"
    """torch's own choice: cuBLAS on CUDA, oneDNN for BF16 on a CPU."""
    BY_ROWS = "by_rows"
    """FP32 on a CPU: a matrix-vector product for one row, torch's choice (MKL) for a few, oneDNN for many.
    MKL uses half the vector width on some CPUs, where oneDNN is twice as fast."""


def select_gemm(device: torch.device, dtype: torch.dtype) -> Gemm:
    """BY_ROWS for FP32 on a CPU whose torch was built with oneDNN, else TORCH."""
    built_in = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return Gemm.BY_ROWS if built_in and device.type == "cpu" and dtype == torch.float32 else Gemm.TORCH


def linear(x: torch.Tensor, weight: torch.Tensor, gemm: Gemm) -> torch.Tensor:
    """Multiply x [T, K] by weight [N, K] transposed: [T, N] in their dtype.

    The library depends on `gemm` and on T alone, so that the same call gives the same bits.
    """
    if gemm is Gemm.BY_ROWS:
        if x.shape[0] == 1:
            return torch.mv(weight, x[0]).unsqueeze(0)
        if x.shape[0] >= _ONEDNN_ROWS:
            return F.linear(x.to_mkldnn(), weight.to_mkldnn()).to_dense()
    return F.linear(x, weight)

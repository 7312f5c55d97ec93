"""x W^T by the fastest library for the device, chosen once when a model is built."""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

__all__ = ["Gemm", "linear", "select_gemm"]

_ONEDNN_ROWS = 64  # below, copying x and W into the library's own tensors costs more than it saves


class Gemm(enum.Enum):
    """Which library multiplies."""

    TORCH = "torch"
    """torch's own choice: cuBLAS on CUDA, MKL for FP32 and oneDNN for BF16 on a CPU."""
    ONEDNN = "onednn"
    """FP32 on a CPU with many rows. torch calls MKL there, which uses half the vector width on some CPUs."""


def select_gemm(device: torch.device, dtype: torch.dtype) -> Gemm:
    """ONEDNN for FP32 on a CPU whose torch was built with it, else TORCH."""
    built_in = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return Gemm.ONEDNN if built_in and device.type == "cpu" and dtype == torch.float32 else Gemm.TORCH


def linear(x: torch.Tensor, weight: torch.Tensor, gemm: Gemm) -> torch.Tensor:
    """Multiply x [T, K] by weight [N, K] transposed: [T, N] in their dtype.

    The library depends on `gemm` and on T alone, so that the same call gives the same bits.
    """
    if gemm is Gemm.ONEDNN and x.shape[0] >= _ONEDNN_ROWS:
        return F.linear(x.to_mkldnn(), weight.to_mkldnn()).to_dense()
    return F.linear(x, weight)

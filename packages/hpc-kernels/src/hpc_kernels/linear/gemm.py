"""x W^T by the library that suits the device and the number of rows."""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

__all__ = ["Gemm", "linear", "select_gemm"]

_ONEDNN_ROWS = 64  # below, copying x and W into the library's own tensors costs more than it saves
# oneDNN compiles code for every number of rows it meets and keeps about 0.75 MB of it each, 1,024 of them:
# prompts of all lengths would cost 800 MB and a compilation each. With rows padded to this, few occur.
_ROW_GRID = 64


class Gemm(enum.Enum):
    """Who multiplies. Chosen once, when a model is built."""

    TORCH = "torch"
    """torch's own choice: cuBLAS on CUDA."""
    ONEDNN = "onednn"
    """BF16 on a CPU: torch chooses oneDNN itself; many rows come on a grid."""
    BY_ROWS = "by_rows"
    """FP32 on a CPU: a matrix-vector product for one row, torch's choice (MKL) for a few, oneDNN for many.
    MKL uses half the vector width on some CPUs, where oneDNN is twice as fast."""


def select_gemm(device: torch.device, dtype: torch.dtype) -> Gemm:
    """BY_ROWS for FP32 and ONEDNN for BF16 on a CPU whose torch was built with oneDNN, else TORCH."""
    built_in = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if not built_in or device.type != "cpu":
        return Gemm.TORCH
    return Gemm.BY_ROWS if dtype == torch.float32 else Gemm.ONEDNN


def linear(x: torch.Tensor, weight: torch.Tensor, gemm: Gemm) -> torch.Tensor:
    """Multiply x [T, K] by weight [N, K] transposed: [T, N] in their dtype.

    The library depends on `gemm` and on T alone, so that the same call gives the same bits.
    """
    T = x.shape[0]
    if gemm is Gemm.BY_ROWS and T == 1:
        return torch.mv(weight, x[0]).unsqueeze(0)
    if gemm is Gemm.TORCH or T < _ONEDNN_ROWS:
        return F.linear(x, weight)
    if T % _ROW_GRID:
        x = F.pad(x, (0, 0, 0, _ROW_GRID - T % _ROW_GRID))
    if gemm is Gemm.BY_ROWS:
        return F.linear(x.to_mkldnn(), weight.to_mkldnn()).to_dense()[:T]
    return F.linear(x, weight)[:T]

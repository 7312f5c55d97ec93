"""Norms, rotation, gated activation and projections against their definitions."""

from __future__ import annotations

import pytest
import torch

from hpc_kernels.linear import Gemm, linear, select_gemm
from hpc_kernels.rms_norm import gated_rms_norm, l2_norm, rms_norm, rms_norm_reference
from hpc_kernels.rotary import apply_rotary, inverse_frequencies, rotary_reference, rotary_table
from hpc_kernels.swiglu import swiglu, swiglu_reference
from hpc_kernels.testing import TOLERANCE, error_ratio

DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    """One weight row for each head, arithmetic in FP32, the input's type out."""
    x, weight = normal(5, 3, 8).to(dtype), normal(3, 8, seed=2)
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    assert error_ratio(out, rms_norm_reference(x, weight, 1e-6)) < TOLERANCE[dtype]


def test_l2_norm() -> None:
    """Every head has length `scale`, and a zero head stays zero."""
    x = normal(4, 2, 8)
    x[0, 0] = 0
    out = l2_norm(x, torch.tensor([[0.5], [1.0]]), 1e-6)
    assert torch.allclose(out.norm(dim=-1)[1:], torch.tensor([0.5, 1.0]).expand(3, 2), atol=1e-5)
    assert torch.equal(out[0, 0], torch.zeros(8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm(dtype: torch.dtype) -> None:
    """The norm comes first, SiLU of the gate multiplies it."""
    x, gate, weight = normal(5, 2, 8), normal(5, 2, 8, seed=3).to(dtype), normal(8, seed=4)
    wide = gate.double()
    expected = rms_norm_reference(x, weight, 1e-6) * wide * torch.sigmoid(wide)
    assert error_ratio(gated_rms_norm(x, gate, weight, 1e-6), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("rotary_dim", [2, 6, 16])
def test_rotary(rotary_dim: int) -> None:
    """Split halves turn by position and frequency; the rest of a head passes through."""
    x = normal(7, 2, 16)
    positions = torch.tensor([0, 1, 2, 50, 51, 400, 401])
    table = rotary_table(positions, inverse_frequencies(rotary_dim, 1e4, torch.device("cpu")))
    expected = rotary_reference(x, positions, rotary_dim, 1e4)
    # FP32 angles: the error of position * frequency grows with the position.
    assert error_ratio(apply_rotary(x, table), expected) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    """The first half of the columns gates the second."""
    x = normal(5, 12).to(dtype)
    assert error_ratio(swiglu(x), swiglu_reference(x)) < TOLERANCE[dtype]


@pytest.mark.parametrize("gemm", Gemm)
@pytest.mark.parametrize("rows", [1, 2, 63, 64, 200])
def test_linear(rows: int, gemm: Gemm) -> None:
    """Either library multiplies by the transposed weight, whatever the number of rows is."""
    x, weight = normal(rows, 24), normal(10, 24, seed=5)
    assert error_ratio(linear(x, weight, gemm), x.double() @ weight.double().t()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("gemm", [Gemm.BY_ROWS, Gemm.ONEDNN])
def test_many_rows_come_on_a_grid(gemm: Gemm, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps compiled code for every number of rows: prompts of all lengths must give it few."""
    seen: set[int] = set()
    plain = torch.nn.functional.linear

    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.add(x.shape[0])
        return plain(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    weight = normal(10, 24)
    for rows in range(64, 330):
        assert linear(normal(rows, 24), weight, gemm).shape == (rows, 10)
    assert seen == {64, 128, 192, 256, 320, 384}


def test_select_gemm() -> None:
    """What depends on rows is for a CPU alone."""
    assert select_gemm(torch.device("cpu"), torch.float32) is Gemm.BY_ROWS
    assert select_gemm(torch.device("cpu"), torch.bfloat16) is Gemm.ONEDNN
    assert select_gemm(torch.device("cuda"), torch.float32) is Gemm.TORCH

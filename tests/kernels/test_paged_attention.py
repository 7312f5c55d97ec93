"""Appending to KV pages and attending over them, against the definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_kernels.kv_append import kv_append, kv_append_reference
from hpc_kernels.paged_attention import (
    page_row,
    paged_attention_reference,
    paged_decode,
    paged_prefill,
)
from hpc_kernels.testing import TOLERANCE, error_ratio

BLOCK, D = 64, 16
TOL = TOLERANCE[torch.float32]


def pages(count: int, HK: int, seed: int) -> torch.Tensor:
    return torch.randn(count, BLOCK, 2, HK, D, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=12, deadline=None)
@given(
    base=st.integers(0, 150),
    T=st.sampled_from([1, 2, 63, 64, 65, 256, 257, 300]),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2)]),
    seed=st.integers(0, 99),
)
def test_prefill_equals_definition(base: int, T: int, heads: tuple[int, int], seed: int) -> None:
    """Any prefix, length and head ratio: each query attends itself and everything before it."""
    HQ, HK = heads
    r = torch.Generator().manual_seed(seed)
    row = torch.randperm(8, generator=r)[: -(-(base + T) // BLOCK)]
    q = torch.randn(T, HQ, D, generator=r)
    kv = pages(8, HK, seed)
    expected = paged_attention_reference(q, kv, row, base, 0.3)
    assert error_ratio(paged_prefill(q, kv, row, base, 0.3), expected) < TOL


def test_decode_equals_definition() -> None:
    """Each lane of a batch attends over its own pages and length."""
    kv, lengths = pages(9, 2, 1), [1, 64, 150]
    rows = [torch.tensor(row) for row in ([4], [2], [8, 0, 5])]
    q = torch.randn(3, 6, D, generator=torch.Generator().manual_seed(2))
    out = paged_decode(q, kv, rows, lengths, 0.25)
    for lane, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        expected = paged_attention_reference(q[lane : lane + 1], kv, row, length - 1, 0.25)
        assert error_ratio(out[lane : lane + 1], expected) < TOL


def test_cells_beyond_the_frontier_are_not_read() -> None:
    """NaN in every cell after the last query, and in every page of others, changes no bit."""
    q = torch.randn(70, 2, D, generator=torch.Generator().manual_seed(3))
    kv, row = pages(4, 1, 4), torch.tensor([3, 1])
    clean = paged_prefill(q, kv, row, 0, 0.25), paged_decode(q[:1], kv, [row], [70], 0.25)
    kv[[0, 2]] = torch.nan
    kv[1, 70 - BLOCK :] = torch.nan
    assert torch.equal(paged_prefill(q, kv, row, 0, 0.25), clean[0])
    assert torch.equal(paged_decode(q[:1], kv, [row], [70], 0.25), clean[1])


def test_consecutive_pages_are_read_where_they_lie() -> None:
    """A run of pages becomes a slice, with the bits of a gathered copy; any other row stays."""
    kv, row, q = pages(6, 2, 7), torch.tensor([2, 3, 4]), torch.randn(150, 4, D)
    run = page_row(row)
    assert run == slice(2, 5)
    assert torch.equal(paged_prefill(q, kv, run, 0, 0.25), paged_prefill(q, kv, row, 0, 0.25))
    assert torch.equal(
        paged_decode(q[:1], kv, [run], [150], 0.25), paged_decode(q[:1], kv, [row], [150], 0.25)
    )
    for other in (torch.tensor([2, 3, 5]), torch.tensor([4, 3, 2]), torch.tensor([2, 4, 3, 5])):
        assert page_row(other) is other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("base", "T"), [(0, 1), (60, 10), (64, 64), (1, 130)])
def test_append_equals_definition(base: int, T: int, dtype: torch.dtype) -> None:
    """Keys and values land in the cells of their positions, rounded to the pages' type, and nowhere else."""
    r = torch.Generator().manual_seed(5)
    key, value = torch.randn(2, T, 2, D, generator=r)
    ours, expected = (pages(5, 2, 6).to(dtype) for _ in range(2))
    row = [4, 0, 2]
    positions = torch.arange(base, base + T)
    cells = torch.tensor(row)[positions // BLOCK] * BLOCK + positions % BLOCK
    kv_append(ours, torch.stack((key, value), 1), cells)
    kv_append_reference(expected, key, value, row, base)
    assert torch.equal(ours, expected)

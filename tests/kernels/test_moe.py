"""Routing and grouped experts against one token and one expert at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_kernels.moe import check_experts, experts_reference, gathered_experts, grouped_experts, route
from hpc_kernels.testing import TOLERANCE, error_ratio


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 20),
    E=st.integers(1, 9),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_both_forms_equal_definition(T: int, E: int, data: st.DataObject, dtype: torch.dtype) -> None:
    """Any number of tokens and experts, idle experts among them, in both dtypes."""
    top, seed = data.draw(st.integers(1, E)), data.draw(st.integers(0, 99))
    r = torch.Generator().manual_seed(seed)
    x, logits = torch.randn(T, 16, generator=r), torch.randn(T, E, generator=r)
    gate_up, down = torch.randn(E, 16, 16, generator=r), torch.randn(E, 16, 8, generator=r)
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    experts, weights = route(logits, top)
    expected = experts_reference(x.double(), experts, weights, gate_up.double(), down.double())
    for form in (grouped_experts, gathered_experts):
        assert error_ratio(form(x, experts, weights, gate_up, down), expected) < TOLERANCE[dtype]


def test_route_takes_the_best_and_renormalises() -> None:
    """The largest logits win and their softmax values are scaled to sum to 1."""
    experts, weights = route(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), 2)
    assert experts.tolist() == [[1, 3]]
    assert torch.allclose(weights, torch.softmax(torch.tensor([[3.0, 2.0]]), -1))


@pytest.mark.parametrize("form", [grouped_experts, gathered_experts])
def test_nan_stays_in_its_token(form: Callable[..., torch.Tensor]) -> None:
    """A token of NaN leaves the other tokens finite."""
    r = torch.Generator().manual_seed(1)
    x, logits = torch.randn(4, 16, generator=r), torch.randn(4, 4, generator=r)
    gate_up, down = torch.randn(4, 16, 16, generator=r), torch.randn(4, 16, 8, generator=r)
    x[2], logits[2] = torch.nan, torch.nan
    out = form(x, *route(logits, 2), gate_up, down)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "hidden", "inner", "text"),
    [
        (torch.float64, 16, 16, "float64"),
        (torch.float32, 6, 16, "hidden size 6 is not a multiple of 4"),
        (torch.bfloat16, 16, 4, "expert intermediate size 4 is not a multiple of 8"),
    ],
)
def test_unsupported_experts_are_refused(dtype: torch.dtype, hidden: int, inner: int, text: str) -> None:
    """A dtype or size that the grouped product cannot take is named."""
    with pytest.raises(ValueError, match=text):
        check_experts(dtype, hidden, inner)

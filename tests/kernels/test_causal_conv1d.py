"""The causal convolution: many tokens and one token against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_kernels.causal_conv1d import causal_conv1d, causal_conv1d_reference, causal_conv1d_step
from hpc_kernels.testing import TOLERANCE, error_ratio


def inputs(T: int, C: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r = torch.Generator().manual_seed(seed)
    return torch.randn(T, C, generator=r), torch.randn(3, C, generator=r), torch.randn(4, C, generator=r)


@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 12), C=st.integers(1, 9), seed=st.integers(0, 99))
def test_prefill_equals_definition(T: int, C: int, seed: int) -> None:
    """Any length, shorter than the window too: the definition's outputs, and its history exactly."""
    x, history, weight = inputs(T, C, seed)
    expected, after = causal_conv1d_reference(x.double(), history, weight)
    assert error_ratio(causal_conv1d(x, history, weight), expected) < TOLERANCE[torch.float32]
    assert torch.equal(history.double(), after)


def test_steps_equal_prefill() -> None:
    """One token a call over a batch of lanes gives each lane its prefill's outputs and history."""
    lanes = [inputs(7, 6, seed) for seed in (1, 2)]
    weight = lanes[0][2]
    histories = torch.stack([history for _, history, _ in lanes])
    steps = [
        causal_conv1d_step(torch.stack([x[t] for x, _, _ in lanes]), histories, weight) for t in range(7)
    ]
    for lane, (x, history, _) in enumerate(lanes):
        expected = causal_conv1d(x, history, weight)
        assert torch.allclose(torch.stack([step[lane] for step in steps]), expected, atol=1e-6)
        assert torch.equal(histories[lane], history)


@pytest.mark.parametrize("T", [1, 2, 5])
def test_history_keeps_the_stored_type(T: int) -> None:
    """BF16 columns are kept as they came: no bit is lost or invented."""
    x, history, weight = inputs(T, 6, 3)
    x, history = x.bfloat16(), history.bfloat16()
    columns = torch.cat((history, x))
    causal_conv1d(x, history, weight)
    assert torch.equal(history, columns[-3:])

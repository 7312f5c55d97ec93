"""The cost model: three terms of prefill, two of restore."""

from __future__ import annotations

import pytest

from hpc_index import PRESETS, CostModel, preset
from hpc_index.errors import PolicyError


def test_prefill_adds_passes_tokens_and_pairs() -> None:
    """3000 tokens after 1000 in chunks of 2048: 2 passes and 3000 * 1000 + 3000 * 3001 / 2 pairs."""
    model = CostModel(chunk_seconds=1.0, chunk_tokens=2048, token_seconds=1e-3, pair_seconds=1e-6)
    assert model.prefill_seconds(1000, 3000) == pytest.approx(2 + 3 + 3.0 + 4.5015)
    assert model.prefill_seconds(1000, 0) == 0


def test_restore_is_a_fixed_cost_and_a_rate() -> None:
    """One gigabyte at 50 GB/s takes 20 ms and the batch cost; nothing takes no time."""
    assert CostModel().restore_seconds(10**9) == pytest.approx(0.02002)
    assert CostModel().restore_seconds(0) == 0


@pytest.mark.parametrize("field", ["token_seconds", "pair_seconds", "chunk_seconds", "batch_seconds"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_cost_is_a_finite_number(field: str, value: float) -> None:
    """Negative, NaN and infinite coefficients are refused by name."""
    with pytest.raises(PolicyError, match=field):
        CostModel(**{field: value})  # type: ignore[arg-type]


def test_presets_are_found_by_name() -> None:
    """`generic` is the default model; an unknown name lists the known ones."""
    assert preset("generic") == CostModel()
    assert all(preset(name).prefill_seconds(0, 1000) > 0 for name in PRESETS)
    with pytest.raises(PolicyError, match=r"generic.*rtx-5090"):
        preset("abacus")

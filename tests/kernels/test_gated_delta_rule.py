"""The gated delta rule: its chunked and its single-step form against the recurrence in FP64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_kernels.gated_delta_rule import (
    CHUNK,
    chunk_gated_delta_rule,
    gates,
    recurrent_gated_delta_rule,
    step_gated_delta_rule,
)
from hpc_kernels.gated_delta_rule.triangular import inverse_unit_lower
from hpc_kernels.testing import TOLERANCE, error_ratio

TOL = TOLERANCE[torch.float32]


class Case(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def part(self, begin: int, end: int) -> Case:
        return Case(*(x[begin:end] for x in self))

    def double(self) -> Case:
        return Case(*(x.double() for x in self))


def case(T: int, HK: int, group: int, K: int, V: int, seed: int, strongest: float = 1.0) -> Case:
    r = torch.Generator().manual_seed(seed)
    q, k = (F.normalize(torch.randn(T, HK, K, generator=r), dim=-1) for _ in range(2))
    v = torch.randn(T, HK * group, V, generator=r)
    g, beta = torch.rand(T, HK * group, generator=r) * -strongest, torch.rand(T, HK * group, generator=r)
    return Case(q * K**-0.5, k, v, g, beta)


def state(c: Case, seed: int = 9) -> torch.Tensor:
    r = torch.Generator().manual_seed(seed)
    return torch.randn(c.v.shape[1], c.k.shape[2], c.v.shape[2], generator=r)


@settings(max_examples=15, deadline=None)
@given(
    T=st.integers(1, 140),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 3), (2, 3)]),
    sizes=st.sampled_from([(16, 16), (8, 32), (32, 8)]),
    strongest=st.sampled_from([0.0, 1.0, 50.0]),
    seed=st.integers(0, 1000),
)
def test_chunks_equal_recurrence(
    T: int, heads: tuple[int, int], sizes: tuple[int, int], strongest: float, seed: int
) -> None:
    """Any length, head ratio, head size and decay gives the recurrence's outputs and final state.

    Cumulative log-decays are FP32: a token that decays by e^-g costs about log2(g) bits.
    """
    tolerance = TOL * max(1.0, strongest)
    c = case(T, *heads, *sizes, seed, strongest)
    start = state(c)
    out, end = recurrent_gated_delta_rule(*c.double(), start.double())
    moved = start.clone()
    assert error_ratio(chunk_gated_delta_rule(*c, moved), out) < tolerance
    assert error_ratio(moved, end) < tolerance


def test_steps_equal_recurrence() -> None:
    """Token after token, each lane of a batch follows its own recurrence."""
    lanes = [case(20, 2, 3, 16, 8, seed) for seed in (1, 2, 3)]
    states = torch.stack([state(c, seed) for seed, c in enumerate(lanes)])
    expected = [
        recurrent_gated_delta_rule(*c.double(), s.double()) for c, s in zip(lanes, states, strict=True)
    ]
    for t in range(20):
        step = Case(*(torch.stack([c[i][t] for c in lanes]) for i in range(5)))
        out = step_gated_delta_rule(*step, states)
        assert error_ratio(out, torch.stack([o[t] for o, _ in expected])) < TOL
    assert error_ratio(states, torch.stack([s for _, s in expected])) < TOL


@pytest.mark.parametrize("T", [1, 63, 64, 65])
def test_padded_tokens_change_nothing(T: int) -> None:
    """Tokens with k = v = g = beta = 0 before or after others leave the state's bits alone (§7.2)."""
    c = case(T, 2, 2, 16, 16, 5)
    zeros = Case(*(torch.zeros(CHUNK, *x.shape[1:]) for x in c))
    start = state(c)
    kept = start.clone()
    chunk_gated_delta_rule(*zeros, kept)
    assert torch.equal(kept, start)
    plain, padded = start.clone(), start.clone()
    chunk_gated_delta_rule(*c, plain)
    longer = Case(*(torch.cat((x, z)) for x, z in zip(c, zeros, strict=True)))
    chunk_gated_delta_rule(*longer, padded)
    assert torch.equal(padded, plain)
    one = start[None].clone()
    step_gated_delta_rule(*zeros.part(0, 1), one)
    assert torch.equal(one[0], start)


@pytest.mark.parametrize("phase", [1, 17, 63])
@pytest.mark.parametrize("T", [1, 64, 130])
def test_a_phase_is_padding_on_the_left(phase: int, T: int) -> None:
    """A call at phase p has the bits of the same tokens after p tokens that change nothing (§7.2)."""
    c = case(T, 2, 2, 16, 16, 6)
    zeros = Case(*(torch.zeros(phase, *x.shape[1:]) for x in c))
    padded = Case(*(torch.cat((z, x)) for x, z in zip(c, zeros, strict=True)))
    moved, expected = state(c), state(c)
    out = chunk_gated_delta_rule(*c, moved, phase)
    assert torch.equal(out, chunk_gated_delta_rule(*padded, expected)[phase:])
    assert torch.equal(moved, expected)


def test_a_phase_outside_a_chunk_is_refused() -> None:
    """A phase is a position within a chunk."""
    c = case(3, 1, 1, 8, 8, 1)
    for phase in (-1, CHUNK):
        with pytest.raises(ValueError, match=f"phase is {phase}: must be 0 to 63"):
            chunk_gated_delta_rule(*c, state(c), phase)


def test_calls_join_on_the_grid() -> None:
    """Cut at a multiple of 64, two calls leave the same bits as one."""
    c = case(200, 2, 2, 16, 16, 6)
    whole, cut = state(c), state(c)
    out = chunk_gated_delta_rule(*c, whole)
    parts = [chunk_gated_delta_rule(*c.part(0, 128), cut), chunk_gated_delta_rule(*c.part(128, 200), cut)]
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(cut, whole)


def test_strong_decay_stays_finite() -> None:
    """Decays that underflow within a chunk give no overflow above the diagonal."""
    c = case(130, 1, 2, 16, 16, 7, strongest=1e4)
    s = state(c)
    out = chunk_gated_delta_rule(*c, s)
    assert out.isfinite().all()
    assert s.isfinite().all()


@pytest.mark.parametrize("n", [1, 8, 16, 32, 64])
def test_inverse_unit_lower(n: int) -> None:
    """The blocked inverse is the inverse of I + tril(a, -1); what `a` holds above does not matter."""
    a = torch.randn(3, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) * 0.3
    full = torch.eye(n, dtype=torch.float64) + a.tril(-1)
    assert torch.allclose(inverse_unit_lower(a) @ full, torch.eye(n, dtype=torch.float64), atol=1e-9)


def test_gates() -> None:
    """The log-decay is -exp(A_log) softplus(a + dt_bias), beta a sigmoid, FP32 whatever the input is."""
    a, b, A_log, dt_bias = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1)).unbind()
    g, beta = gates(b.bfloat16(), a.bfloat16(), -A_log[0].exp(), dt_bias[0])
    wide = a.bfloat16().double()
    assert g.dtype == beta.dtype == torch.float32
    assert error_ratio(g, -A_log[0].double().exp() * torch.log1p(torch.exp(wide + dt_bias[0]))) < TOL
    assert error_ratio(beta, 1 / (1 + torch.exp(-b.bfloat16().double()))) < TOL

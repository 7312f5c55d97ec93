"""Choosing torch's number of threads from measured times."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_qwen35.threads import Measure, ThreadTiming, candidates, choose_threads, torch_measure


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(decode: dict[int, float], prefill: dict[int, float]) -> Measure:
    return lambda threads: ThreadTiming(threads=threads, decode=decode[threads], prefill=prefill[threads])


def test_each_phase_gets_its_own_number() -> None:
    """A phase that gains from threads gets them, the other does not."""
    choice = choose_threads(2, measured({1: 1.0, 2: 1.4}, {1: 8.0, 2: 4.5}))
    assert (choice.decode, choice.prefill) == (1, 2)


def test_a_small_gain_does_not_take_a_core() -> None:
    """Eight per cent are not worth another thread, fifteen are."""
    choice = choose_threads(2, measured({1: 1.0, 2: 0.92}, {1: 1.0, 2: 0.85}))
    assert (choice.decode, choice.prefill) == (1, 2)


@given(
    times=st.lists(st.tuples(*[st.floats(1e-6, 10.0)] * 2), min_size=1, max_size=8),
)
def test_the_choice_is_the_fewest_threads_within_a_tenth_of_the_fastest(
    times: list[tuple[float, float]],
) -> None:
    """Whatever was measured, no smaller team is within a tenth of the best, and the chosen one is."""
    cores = 2 ** (len(times) - 1)
    table = dict(zip(candidates(cores), times, strict=True))
    choice = choose_threads(
        cores, measured({n: t[0] for n, t in table.items()}, {n: t[1] for n, t in table.items()})
    )
    for phase, chosen in ((0, choice.decode), (1, choice.prefill)):
        fastest = min(table[t.threads][phase] for t in choice.timings)
        assert table[chosen][phase] * 0.9 <= fastest
        assert all(table[n][phase] * 0.9 > fastest for n in candidates(cores) if n < chosen)


def test_candidates_double_up_to_the_cores() -> None:
    """Powers of two below the cores, and the cores themselves."""
    assert candidates(1) == (1,)
    assert candidates(2) == (1, 2)
    assert candidates(6) == (1, 2, 4, 6)
    assert candidates(8) == (1, 2, 4, 8)


def test_no_cores_are_refused() -> None:
    """The message names the value and the bound."""
    with pytest.raises(ValueError, match="cores is 0; it must be at least 1"):
        candidates(0)


def test_measuring_stops_when_the_time_is_used_up() -> None:
    """Candidates past the budget are named, not dropped quietly."""
    clock = FakeClock()

    def slow(threads: int) -> ThreadTiming:
        clock.now += 0.2
        return ThreadTiming(threads=threads, decode=1.0 / threads, prefill=1.0 / threads)

    choice = choose_threads(16, slow, budget=0.3, clock=clock)
    assert [t.threads for t in choice.timings] == [1, 2]
    assert choice.unmeasured == (4, 8, 16)
    assert choice.prefill == 2
    assert choice.seconds == pytest.approx(0.4)
    assert "not measured: 4, 8, 16" in choice.summary()


def test_measuring_stops_when_more_threads_only_hurt() -> None:
    """On a machine with fewer real cores than it shows, the larger teams are not tried."""
    decode = {1: 1.0, 2: 1.0, 4: 2.0}
    choice = choose_threads(64, measured(decode, {1: 4.0, 2: 2.0, 4: 3.5}))
    assert choice.unmeasured == (8, 16, 32, 64)
    assert (choice.decode, choice.prefill) == (1, 2)


def test_torch_is_measured_within_its_time_and_left_as_it_was() -> None:
    """A real measurement gives positive times and puts the number of threads back."""
    before = torch.get_num_threads()
    timing = torch_measure(torch.float32, 64, slice_seconds=0.001)(1)
    assert timing.threads == 1
    assert 0.0 < timing.decode < 1.0
    assert 0.0 < timing.prefill < 1.0
    assert torch.get_num_threads() == before


def test_the_number_of_threads_is_put_back_after_a_failure() -> None:
    """A clock that fails does not leave the process at another number of threads."""
    before = torch.get_num_threads()

    def broken() -> float:
        raise RuntimeError("no clock")

    with pytest.raises(RuntimeError, match="no clock"):
        torch_measure(torch.float32, 64, clock=broken)(before + 1)
    assert torch.get_num_threads() == before

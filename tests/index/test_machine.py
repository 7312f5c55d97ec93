"""Random interleavings of every operation, on digests, with every rule of §10 checked after each step."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from hpc_index import check_invariants
from tests.index.adversary import STEPS, Adversary

NAMES = [name for name, weight in STEPS for _ in range(weight)]


class IndexMachine(RuleBasedStateMachine):
    """Lanes of a tiny engine, run by an adversary whose choices Hypothesis makes and shrinks."""

    @initialize(data=st.data())
    def setup(self, data: st.DataObject) -> None:
        self.adversary = Adversary(lambda k: data.draw(st.integers(0, k - 1)))

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def step(self, data: st.DataObject, name: str) -> None:
        self.adversary.choose = lambda k: data.draw(st.integers(0, k - 1))
        getattr(self.adversary, name)()
        check_invariants(self.adversary.engine.index)

    def teardown(self) -> None:
        if hasattr(self, "adversary"):
            self.adversary.close()


IndexMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestIndexMachine = IndexMachine.TestCase


def drive(seed: int, steps: int) -> Counter[str]:
    """One long history from a seed; the counters it ended with."""
    rng = random.Random(seed)
    adversary = Adversary(rng.randrange)
    for _ in range(steps):
        getattr(adversary, rng.choice(NAMES))()
        check_invariants(adversary.engine.index)
    adversary.close()
    return Counter(adversary.engine.index.stats().counters)


def test_long_histories_reach_every_path() -> None:
    """Seeded histories end balanced, and between them every eviction, failure and fallback happened."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += drive(seed, 120)
    wanted = {
        "adopted_blocks",
        "duplicates",
        "endpoints_published",
        "evicted_device_blocks.backed",
        "evicted_device_blocks.unbacked",
        "evicted_host_snapshots",
        "evicted_slots.least_recent",
        "evicted_slots.superseded",
        "grow_short",
        "prefetched_blocks",
        "restore_failed",
        "restores",
        "suspended",
        "taps_dropped.no_slot",
        "taps_published",
        "write_failed",
    }
    assert wanted <= set(seen), sorted(wanted - set(seen))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_many_long_histories(seed: int) -> None:
    """The same, at length: 400 histories of 300 steps."""
    drive(seed, 300)

"""Which snapshot gives up its device slot (§9.2), and supersession (§9.3, D20)."""

from __future__ import annotations

from hpc_index.records import Ending, HintKind, TapHint
from hpc_index.snapshots import is_shared
from tests.index.double import Engine
from tests.index.strategies import engine, policy, prompt, random_tokens

PLAIN = policy(taps_per_request=0)


def frontiers(double: Engine) -> list[int]:
    """Frontiers of the snapshots with a device image."""
    return sorted(s.frontier for s in double.index._store.snapshots if s.slot >= 0)


def test_a_lineage_pays_for_its_own_progress() -> None:
    """Two conversations, two slots, no host: each turn takes its own predecessor's slot, not the other's."""
    double = engine(PLAIN, snapshots=2)
    a, b = random_tokens(1, 100), random_tokens(2, 150)
    for _ in range(3):
        for talk in (a, b):
            _, reused = double.complete(prompt(list(talk)), range(70), budget=512)
            talk += list(range(70))
            assert reused in (0, len(talk) - 70 - 30)
            talk += random_tokens(len(talk), 30)
    assert double.index.stats().counters.get("evicted_slots.least_recent", 0) == 0
    assert double.index.stats().counters["evicted_slots.superseded"] == 4


def test_a_superseded_slot_goes_before_an_older_retained_one() -> None:
    """The predecessor in another slot goes before the least recently hit conversation."""
    double = engine(PLAIN, snapshots=3)
    old, talk = random_tokens(1, 100), random_tokens(2, 100)
    double.complete(prompt(old), [], budget=512)
    double.complete(prompt(talk), [], budget=512)
    double.complete(prompt([*talk, *random_tokens(3, 100)]), [], budget=512)
    assert frontiers(double) == [100, 100, 200]
    double.complete(prompt(random_tokens(4, 300)), [], budget=512)
    assert frontiers(double) == [100, 200, 300]
    assert double.index.quote(prompt([*old, 1]), 1, 0.0).reuse == 100


def test_a_hit_retains_a_superseded_snapshot() -> None:
    """A retry from the older endpoint takes its mark away (§9.3)."""
    double = engine(PLAIN, snapshots=3)
    talk = random_tokens(2, 100)
    double.complete(prompt(talk), [], budget=512)
    double.complete(prompt([*talk, *random_tokens(3, 100)]), [], budget=512)
    older = next(s for s in double.index._store.snapshots if s.frontier == 100)
    assert older.superseded
    run = double.start(prompt([*talk, *random_tokens(4, 5)]), 1)
    assert run.lane.frontier == 100
    assert not older.superseded


def test_a_shared_boundary_is_not_superseded() -> None:
    """Two conversations continue from the end of a system block: it stays retained when each moves on."""
    double = engine(policy(), snapshots=6)
    system = random_tokens(1, 150)
    for seed in (2, 3, 4):
        _, reused = double.complete(
            prompt([*system, *random_tokens(seed, 90)], TapHint(150, HintKind.STRUCTURAL)), range(70), 512
        )
        assert reused == (0 if seed == 2 else 150)
    boundary = next(s for s in double.index._store.snapshots if s.frontier == 150)
    assert not boundary.superseded


def test_all_slots_pinned_drops_the_tap_and_the_request_goes_on() -> None:
    """One slot, held by a restore in flight of another lane: the tap is counted, nothing else changes."""
    double = engine(policy(), snapshots=1, slabs=60, lanes=2)
    tokens = random_tokens(1, 100)
    double.complete(prompt(tokens), [], budget=512)
    other = double.start(prompt(random_tokens(2, 300), TapHint(130, HintKind.EXPLICIT)), 1)
    staged = double.stage(prompt([*tokens, 1]), 1)
    while not other.prefilled:
        double.prefill(other, 512)
    assert double.index.stats().counters["taps_dropped.no_slot"] >= 1
    assert staged is not None


def test_without_snapshot_slots_nothing_is_planned_or_kept() -> None:
    """slots == lanes: blocks are shared while lanes run, no tap is planned, endpoints are skipped."""
    double = engine(snapshots=0)
    double.complete(prompt(random_tokens(1, 200), TapHint(130, HintKind.EXPLICIT)), range(70))
    counters = double.index.stats().counters
    assert counters.get("taps_planned", 0) == 0
    assert counters["endpoints_skipped.no_slot"] == 1


def test_the_least_recently_hit_owner_gives_up_its_slot() -> None:
    """Of two conversations that nothing superseded, the one that was hit last stays (§9.2)."""
    double = engine(PLAIN, snapshots=2)
    a, b = random_tokens(1, 100), random_tokens(2, 150)
    double.complete(prompt(a), [], budget=512)
    double.complete(prompt(b), [], budget=512)
    double.finish(double.start(prompt([*a, 1]), 1), Ending.FAILED)
    double.complete(prompt(random_tokens(3, 200)), [], budget=512)
    assert frontiers(double) == [100, 200]


def test_what_was_superseded_first_goes_first() -> None:
    """A conversation of three turns leaves two superseded endpoints; the older one pays (§9.2)."""
    double = engine(PLAIN, snapshots=3)
    talk = random_tokens(1, 100)
    for turn in (2, 3):
        double.complete(prompt(list(talk)), [], budget=512)
        talk += random_tokens(turn, 100)
    double.complete(prompt(list(talk)), [], budget=512)
    double.complete(prompt(random_tokens(4, 150)), [], budget=512)
    assert frontiers(double) == [150, 200, 300]


def test_a_shared_boundary_does_not_pay_for_one_of_its_conversations() -> None:
    """Two conversations continue from it: a third one's snapshot takes the least recent slot instead."""
    double = engine(policy(), snapshots=3)
    system = random_tokens(1, 128)
    hint = TapHint(128, HintKind.STRUCTURAL)
    for seed in (2, 3):
        double.complete(prompt([*system, *random_tokens(seed, 90)], hint), [], budget=512)
    assert frontiers(double) == [128, 218, 218]
    double.complete(prompt([*system, *random_tokens(4, 100)], hint), [], budget=512)
    assert frontiers(double) == [128, 218, 228]


def test_only_a_boundary_can_be_shared() -> None:
    """An endpoint that two conversations continued from is superseded by each (§9.3)."""
    double = engine(PLAIN, snapshots=6)
    talk = random_tokens(1, 128)
    double.complete(prompt(talk), [], budget=512)
    for seed in (2, 3):
        double.complete(prompt([*talk, *random_tokens(seed, 100)]), [], budget=512)
    endpoint = next(s for s in double.index._store.snapshots if s.frontier == 128)
    assert endpoint.superseded


def test_a_boundary_is_shared_wherever_its_conversations_part() -> None:
    """They have three more blocks in common before they fork (§9.3)."""
    double = engine(policy(), snapshots=6)
    system, common = random_tokens(1, 128), random_tokens(2, 192)
    for seed in (3, 4, 5):
        tokens = [*system, *common, *random_tokens(seed, 100)]
        double.complete(prompt(tokens, TapHint(128, HintKind.STRUCTURAL)), [], budget=512)
    boundary = next(s for s in double.index._store.snapshots if s.frontier == 128)
    assert is_shared(boundary)

"""Which taps are captured where, as what, and what they supersede (§7.1, §7.4, §9.3)."""

from __future__ import annotations

from hpc_index.records import Ending, HintKind, SnapshotKind, TapHint
from hpc_index.snapshots import Snapshot
from tests.index.double import Engine, Run, tokens_of
from tests.index.strategies import engine, policy, prompt, random_tokens


def snapshots(double: Engine) -> dict[int, Snapshot]:
    """By frontier; no two of a test's snapshots have the same."""
    return {s.frontier: s for s in double.index._store.snapshots}


def prefilled(double: Engine, run: Run, budget: int, taps_inside: bool = False) -> None:
    while not run.prefilled:
        double.prefill(run, budget, taps_inside)


def explicit(position: int) -> TapHint:
    return TapHint(position, HintKind.EXPLICIT)


def test_a_tap_near_the_snapshot_resumed_from_is_dropped() -> None:
    """The prompt's tail falls due at 264, 64 tokens past the base at 200 (D3)."""
    double = engine(slabs=60)
    old = random_tokens(1, 200)
    double.complete(prompt(old), [], budget=512)
    run = double.start(prompt([*old, *random_tokens(2, 100)]), 1)
    assert run.lane.frontier == 200
    prefilled(double, run, 64)
    assert double.index.stats().counters["taps_dropped.near"] == 1
    assert 264 not in snapshots(double)


def test_a_tap_near_the_one_before_it_is_dropped() -> None:
    """The prompt's tail falls due at 194, 64 tokens past the marker's tap at 130 (D3)."""
    double = engine()
    run = double.start(prompt(random_tokens(1, 256), explicit(130)), 1)
    prefilled(double, run, 64)
    assert set(snapshots(double)) == {130}
    assert double.index.stats().counters["taps_dropped.near"] == 1


def test_a_flexible_tap_of_the_last_chunk_is_taken_before_it() -> None:
    """With exactly one chunk left at 128 the tail at 191 has no later boundary below the prompt's end."""
    double = engine()
    run = double.start(prompt(random_tokens(1, 192)), 1)
    prefilled(double, run, 64)
    assert set(snapshots(double)) == {128}


def test_an_exact_tap_of_the_last_chunk_is_not_lost_to_a_flexible_one() -> None:
    """The ladder's tap at 644 lies in the last chunk, and so does the marker at 800, which ends one."""
    double = engine(policy(tap_ladder_tokens=256, tap_min_gap_tokens=64), pages=20)
    run = double.start(prompt(random_tokens(1, 900), explicit(800)), 1)
    prefilled(double, run, 512)
    assert snapshots(double)[800].kind is SnapshotKind.BOUNDARY


def test_one_capture_for_two_taps_is_of_the_exact_one_s_kind() -> None:
    """The ladder's tap at 144 falls due where the marker's chunk ends: one snapshot there, a Boundary."""
    double = engine(policy(tap_ladder_tokens=256, tap_min_gap_tokens=64))
    run = double.start(prompt(random_tokens(1, 400), explicit(300)), 1)
    double.prefill(run, 512)
    assert {f: s.kind for f, s in snapshots(double).items()} == {300: SnapshotKind.BOUNDARY}
    assert double.index.stats().counters["taps_dropped.merged"] >= 1


def test_a_tap_inside_a_chunk_has_its_own_kind() -> None:
    """A program that captures mid-chunk publishes a client's marker as a Boundary too (§7.3)."""
    double = engine()
    run = double.start(prompt(random_tokens(1, 300), explicit(128)), 1)
    prefilled(double, run, 512, taps_inside=True)
    assert snapshots(double)[128].kind is SnapshotKind.BOUNDARY


def test_an_exact_tap_that_was_run_over_is_dropped() -> None:
    """Committed past, its state is gone: nothing is published under another position in its name."""
    double = engine()
    tokens = random_tokens(1, 300)
    run = double.start(prompt(tokens, explicit(130)), 1)
    double.index.commit(run.lane.id, tokens_of(tokens[:200]), (200,), 0.0)
    assert double.index.stats().counters["taps_dropped.passed"] == 1
    assert not [s for s in snapshots(double).values() if s.kind is SnapshotKind.BOUNDARY]


def test_a_tap_supersedes_the_one_before_it_in_the_same_prompt() -> None:
    """Only a divergence between the two still needs the first (§9.3)."""
    double = engine(policy(tap_ladder_tokens=256, tap_min_gap_tokens=64), pages=20)
    run = double.start(prompt(random_tokens(1, 1100)), 1)
    prefilled(double, run, 128)
    found = [s for _, s in sorted(snapshots(double).items())]
    assert len(found) > 1
    assert [bool(s.superseded) for s in found] == [True] * (len(found) - 1) + [False]


def test_a_capture_that_exists_already_refreshes_it() -> None:
    """Two lanes with one marker: the second takes no slot, and the snapshot counts as just used (D5)."""
    double = engine(lanes=3)
    tokens = random_tokens(1, 140)
    a, b = (double.start(prompt(tokens, explicit(130)), 1) for _ in range(2))
    double.prefill(a, 512)
    other = double.start(prompt(random_tokens(2, 140), explicit(129)), 1)
    double.prefill(other, 512)
    assert snapshots(double)[130].last_hit < snapshots(double)[129].last_hit
    double.prefill(b, 512)
    assert double.index.stats().counters["taps_dropped.duplicate"] == 1
    assert snapshots(double)[130].last_hit > snapshots(double)[129].last_hit


def test_an_endpoint_that_exists_already_refreshes_it() -> None:
    """A lane set aside where another one ended: that endpoint counts as just used (D5)."""
    double = engine(policy(taps_per_request=0))
    tokens = random_tokens(1, 200)
    double.complete(prompt(tokens), [], budget=512)
    double.complete(prompt(random_tokens(2, 100)), [], budget=512)
    again = double.start(prompt(tokens), 1)
    double.prefill(again, 512)
    double.finish(again, Ending.SUSPENDED)
    assert double.index.stats().counters["endpoints_skipped.duplicate"] == 1
    assert snapshots(double)[200].last_hit > snapshots(double)[100].last_hit


def test_an_endpoint_does_not_take_the_slot_of_its_own_prompt_s_tap() -> None:
    """A next turn that re-renders the reply resumes from that tap; another conversation pays (§9.3)."""
    double = engine(snapshots=2)
    double.complete(prompt(random_tokens(1, 70)), [], budget=512)
    double.complete(prompt(random_tokens(2, 192)), range(64))
    assert set(snapshots(double)) == {128, 256}

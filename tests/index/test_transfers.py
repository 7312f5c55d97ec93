"""Copies that fail, land late, or outlive what started them (§6.5, §10 invariant 6)."""

from __future__ import annotations

import pytest

from hpc_index import check_invariants
from hpc_index.errors import TicketError
from hpc_index.records import Ending, HintKind, TapHint
from tests.index.double import Engine, Run
from tests.index.strategies import engine, policy, prompt, random_tokens

TOKENS = random_tokens(1, 200)


def on_host(taps: int = 0) -> Engine:
    """TOKENS cached on the host only, image included, in a pool of 12 pages."""
    double = engine(policy(taps_per_request=taps), slabs=60, pages=12, snapshots=1, lanes=3)
    double.complete(prompt(TOKENS), [], budget=512)
    double.complete(prompt(random_tokens(9, 70)), [], budget=512)
    double.complete(prompt(random_tokens(8, 700), cacheable=False), [], budget=1024)
    return double


def restoring(double: Engine) -> Run:
    run = double.stage(prompt([*TOKENS, 1]), 1)
    assert isinstance(run, Run)
    assert double.open
    return run


def test_a_failed_restore_fails_every_lane_that_maps_its_blocks() -> None:
    """Two lanes share filling blocks; both are named, and the host copies serve the next request."""
    double = on_host()
    a, b = restoring(double), restoring(double)
    first = next(iter(double.open))
    failed = double.land(first, ok=False)
    assert failed == (a.lane.id, b.lane.id)
    check_invariants(double.index)
    for run in (a, b):
        double.finish(run, Ending.FAILED)
    double.land_all()
    check_invariants(double.index)
    quote = double.index.quote(prompt([*TOKENS, 1]), 1, 0.0)
    assert (quote.reuse, quote.restore_bytes) == (200, 8000)
    run = restoring(double)
    double.activate(run)
    double.prefill(run, 64)


def test_a_lane_publishes_nothing_before_its_restore_landed() -> None:
    """What it computes meanwhile may be garbage: when the restore fails, none of it is in the cache."""
    double = on_host(taps=2)
    blocks = double.index.stats().blocks
    hints = (TapHint(230, HintKind.EXPLICIT), TapHint(260, HintKind.EXPLICIT))
    snapshots = double.index.stats().snapshots
    run = double.stage(prompt([*TOKENS, *random_tokens(3, 200)], *hints), 1)
    assert isinstance(run, Run)
    double.activate(run)
    ticket = next(iter(double.open))
    double.doom(ticket)
    while not run.prefilled:
        double.prefill(run, 512)
    assert run.garbage
    assert (double.index.stats().blocks, double.index.stats().snapshots) == (blocks, snapshots)
    assert double.land(ticket) == (run.lane.id,)
    double.finish(run)
    double.land_all()
    assert (double.index.stats().blocks, double.index.stats().snapshots) == (blocks, snapshots)
    assert double.index.stats().counters["endpoints_skipped.restore_failed"] >= 1


def test_what_waited_is_published_once_the_restore_landed() -> None:
    """A late report delays publication, it does not lose it."""
    double = on_host()
    run = double.stage(prompt([*TOKENS, *random_tokens(3, 100)]), 10)
    assert isinstance(run, Run)
    double.activate(run)
    double.prefill(run, 512)
    before = double.index.stats().blocks
    double.land_all()
    double.decode(run, 1)
    assert double.index.stats().blocks == before + 1


def test_a_lane_cancelled_while_staged_leaves_its_slot_to_the_copy() -> None:
    """The slot is a destination until the restore lands; then it is free, and the blocks are cached."""
    double = on_host()
    run = restoring(double)
    free = double.index.stats().slots_free
    double.finish(run, Ending.UNSTAGED)
    assert double.index.stats().slots_free == free
    check_invariants(double.index)
    double.land_all()
    assert double.index.stats().slots_free == free + 1
    assert double.index.quote(prompt([*TOKENS, 1]), 1, 0.0).restore_bytes == 4000, "only the image"


def test_a_failed_write_gives_its_slabs_back() -> None:
    """The snapshot stays on the device; its slabs are free again."""
    double = engine(policy(taps_per_request=0), slabs=60)
    run = double.start(prompt(TOKENS), 1)
    double.prefill(run, 512)
    double.finish(run)
    assert double.index.stats().slabs_used == 8
    double.land(next(iter(double.open)), ok=False)
    stats = double.index.stats()
    assert (stats.slabs_used, stats.counters["write_failed"]) == (0, 1)
    assert double.index.quote(prompt([*TOKENS, 1]), 1, 0.0).reuse == 200


def test_a_failed_capture_is_never_resumed_from() -> None:
    """A tap whose own copy failed disappears with the last copy that reads it."""
    double = engine(slabs=60)
    run = double.start(prompt(TOKENS, TapHint(130, HintKind.EXPLICIT)), 1)
    chunk = double.index.next_chunk(run.lane.id, 512, False, 0.0)
    plans = double.index.commit(run.lane.id, prompt(TOKENS).tokens[: chunk.end], (chunk.end,), 0.0)
    compute, write = plans
    assert write.after == (compute.ticket,)
    double.index.landed(compute.ticket, False, 0.0)
    assert double.index.quote(prompt(TOKENS), 1, 0.0).reuse == 0
    double.index.landed(write.ticket, True, 0.0)
    check_invariants(double.index)
    assert double.index.stats().snapshots == 0
    assert double.index.stats().counters["captures_failed"] == 1


def test_a_failed_capture_that_waits_for_its_block_is_dropped() -> None:
    """A lagging pool delays publication at 128; the copy fails meanwhile, and nothing is published."""
    double = engine(lags=(0, 1))
    run = double.start(prompt(TOKENS, TapHint(128, HintKind.EXPLICIT)), 1)
    double.index.next_chunk(run.lane.id, 512, False, 0.0)
    tokens = prompt(TOKENS).tokens
    (compute,) = double.index.commit(run.lane.id, tokens[:128], (128, 127), 0.0)
    double.index.landed(compute.ticket, False, 0.0)
    double.index.commit(run.lane.id, tokens[128:], (200, 199), 0.0)
    stats = double.index.stats()
    assert (stats.snapshots, stats.counters["taps_dropped.copy_failed"]) == (0, 1)
    check_invariants(double.index)


def test_a_failed_activation_fails_its_lane() -> None:
    """The lane's state is not what it should be: it is named, and leaves nothing."""
    double = engine()
    run = double.stage(prompt(TOKENS), 1)
    assert isinstance(run, Run)
    (plan,) = double.index.activate(run.lane.id, 0.0)
    assert double.index.landed(plan.ticket, False, 0.0) == (run.lane.id,)
    double.finish(run, Ending.CANCELLED)
    assert double.index.stats().snapshots == 0


def test_a_plan_lands_once() -> None:
    """A second report of the same ticket is an error, not a second release."""
    double = on_host()
    restoring(double)
    ticket = next(iter(double.open))
    double.land(ticket)
    with pytest.raises(TicketError, match="landed before"):
        double.index.landed(ticket, True, 0.0)


def test_a_tail_that_another_lane_brings_back_is_waited_for() -> None:
    """The second lane copies from a tail page that the first one's restore still fills (§6.5)."""
    double = on_host()
    plans = double.index.prefetch(prompt([*TOKENS, 1]), 0.0)
    assert plans is not None
    double.submit(plans)
    double.land_all()
    first = restoring(double)
    (ticket,) = double.open
    assert first.waits == {ticket}
    second = double.stage(prompt([*TOKENS, 2]), 1)
    assert isinstance(second, Run)
    double.land(max(double.open))
    (plan,) = double.index.activate(second.lane.id, 0.0)
    assert plan.after == (ticket,)


def test_a_source_is_pinned_until_its_activation_landed() -> None:
    """Neither image nor tail can go while the copy that builds the lane from them is queued (§6.4)."""
    double = engine(policy(taps_per_request=0), snapshots=1, lanes=3)
    double.complete(prompt(TOKENS), [], budget=512)
    (snapshot,) = double.index._store.snapshots
    staged = double.index.stage(double.index.quote(prompt([*TOKENS, 1]), 1, 0.0), prompt([*TOKENS, 1]), 0.0)
    assert isinstance(staged, tuple)
    lane, _ = staged
    (plan,) = double.index.activate(lane.id, 0.0)
    assert snapshot.pins == 1
    double.index.landed(plan.ticket, True, 0.0)
    assert snapshot.pins == 0


def test_pages_that_a_lane_maps_are_not_about_to_come_free() -> None:
    """A write pins a running lane's blocks; when it lands they are still the lane's (D7)."""
    double = engine(policy(), slabs=60)
    run = double.start(prompt(random_tokens(3, 300), TapHint(128, HintKind.EXPLICIT)), 1)
    double.prefill(run, 512)
    double.prefill(run, 512)
    assert double.open
    assert double.index._store.landing() == 0

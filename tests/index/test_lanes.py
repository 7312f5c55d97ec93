"""The life of a lane: admission, chunks, commits, growth, endings (§6.4, §7.4-7.7)."""

from __future__ import annotations

import numpy as np
import pytest

from hpc_index.errors import LaneError, PromptError, StateError, TicketError
from hpc_index.ids import LaneId, Ticket
from hpc_index.records import (
    CopyKind,
    Ending,
    Finish,
    Grown,
    HintKind,
    Plan,
    Plans,
    Short,
    Skipped,
    SnapshotKind,
    Stream,
    TapHint,
)
from tests.index.double import Engine, Run, tokens_of
from tests.index.strategies import engine, policy, prompt, random_tokens


def balanced(double: Engine) -> None:
    """Nothing is held any more but by the cache."""
    stats = double.index.stats()
    assert stats.lanes == stats.slots_active == stats.tickets_open == 0
    assert set(stats.pages_active) == set(stats.pages_filling) == {0}


def test_a_second_turn_resumes_at_the_exact_endpoint() -> None:
    """The first turn's endpoint lies inside a block; its tail page came without a copy."""
    double = engine()
    first = random_tokens(1, 100)
    run, _ = double.complete(prompt(first), range(75))
    turn = [*first, *range(75), *random_tokens(2, 50)]
    _, reused = double.complete(prompt(turn), range(10))
    assert reused == 175
    assert run.lane.frontier == 175
    balanced(double)


def test_a_resumed_lane_copies_the_tail_it_will_write_into() -> None:
    """Activation copies 175 % 64 = 47 columns and the image, and shares two full pages."""
    double = engine()
    first = random_tokens(1, 100)
    double.complete(prompt(first), range(75))
    run = double.stage(prompt([*first, *range(75), 5, 6]), 8)
    assert isinstance(run, Run)
    (plan,) = double.index.activate(run.lane.id, 0.0)
    assert plan.stream is Stream.COMPUTE
    kinds = {c.kind: c for c in plan.copies}
    assert set(kinds) == {CopyKind.SLOT_TO_SLOT, CopyKind.PAGE_TO_PAGE}
    assert kinds[CopyKind.PAGE_TO_PAGE].columns == 47
    assert kinds[CopyKind.SLOT_TO_SLOT].dst.tolist() == [run.lane.slot]
    nodes = [n.pages[0] for n in double.index._store.tree.nodes()]
    assert run.lane.pages[0][:2].tolist() == nodes[:2]


def test_a_fresh_lane_starts_from_zero() -> None:
    """Nothing cached: one ZERO_SLOT, no restore, rows mapped to prompt and window."""
    double = engine()
    run = double.stage(prompt(random_tokens(1, 100)), 10)
    assert isinstance(run, Run)
    assert not double.open
    assert (run.lane.pages[0] >= 0).sum() == 2
    (plan,) = double.index.activate(run.lane.id, 0.0)
    assert [c.kind for c in plan.copies] == [CopyKind.ZERO_SLOT]


def test_chunks_end_at_budget_exact_taps_and_the_end() -> None:
    """Prompt 300 with a marker at 130: 128, 130, 258, 300."""
    double = engine()
    run = double.start(prompt(random_tokens(1, 300), TapHint(130, HintKind.EXPLICIT)), 1)
    ends = []
    while not run.prefilled:
        double.prefill(run, 128)
        ends.append(run.lane.frontier)
    assert ends == [128, 130, 258, 300]


def test_taps_inside_a_chunk_take_slots_and_do_not_end_it() -> None:
    """A program that taps mid-chunk gets one slot a tap, the same again when it asks again."""
    double = engine()
    hints = (TapHint(130, HintKind.EXPLICIT), TapHint(200, HintKind.EXPLICIT))
    run = double.start(prompt(random_tokens(1, 300), *hints), 1)
    chunk = double.index.next_chunk(run.lane.id, 512, True, 0.0)
    assert chunk.end == 300
    assert [t.position for t in chunk.taps] == [130, 200]
    assert double.index.next_chunk(run.lane.id, 512, True, 0.0) == chunk
    double.prefill(run, 512, taps_inside=True)
    assert double.index.stats().counters["taps_published"] == 2
    for length, at in ((201, 200), (150, 130)):
        assert double.index.quote(prompt(run.tokens[:length]), 1, 0.0).reuse == at


def test_an_exact_tap_inside_a_block_owns_a_copied_tail() -> None:
    """130 % 64 = 2 columns go to a page of the cache; the lane writes on in its own (§7.4)."""
    double = engine()
    tokens = random_tokens(1, 200)
    run = double.start(prompt(tokens, TapHint(130, HintKind.EXPLICIT)), 1)
    double.prefill(run, 512)
    tap = next(iter(double.index._store.snapshots))
    assert (tap.frontier, tap.kind, len(tap.pages)) == (130, SnapshotKind.BOUNDARY, 1)
    assert tap.pages[0] not in run.lane.pages[0]
    double.prefill(run, 512)
    _, reused = double.complete(prompt([*tokens[:130], *random_tokens(2, 40)]), [])
    assert reused == 130


def test_a_flexible_tap_waits_for_a_chunk_boundary() -> None:
    """The prompt tail of 300 tokens in chunks of 128 is taken at 256, before the last chunk."""
    double = engine(policy(prefill_chunk=128))
    run = double.start(prompt(random_tokens(1, 300)), 1)
    while not run.prefilled:
        double.prefill(run, 128)
    assert [s.frontier for s in double.index._store.snapshots] == [256]


def test_blocks_are_published_as_they_fill() -> None:
    """Prefill of 130 publishes two blocks, decoding 62 more the third."""
    double = engine()
    run = double.start(prompt(random_tokens(1, 130)), 64)
    double.prefill(run, 512)
    assert double.index.stats().blocks == 2
    for token in range(62):
        double.decode(run, token)
    assert double.index.stats().blocks == 3


def test_identical_prompts_together_both_run_and_share_nothing_private() -> None:
    """The second lane's blocks are Duplicates, freed at its end (§7.6)."""
    double = engine(lanes=2)
    view = prompt(random_tokens(1, 200))
    a, b = double.start(view, 8), double.start(view, 8)
    for run in (a, b):
        double.prefill(run, 512)
    stats = double.index.stats()
    assert (stats.blocks, stats.counters["duplicates"]) == (3, 3)
    for run in (a, b):
        double.finish(run)
    double.land_all()
    assert double.index.stats().snapshots == 1
    assert double.index.stats().pages_cached == (4,)
    balanced(double)


def test_a_recomputed_block_gives_a_host_only_one_its_page() -> None:
    """A block that lives only on the host adopts the page of a lane that computed it again (§7.6)."""
    double = engine(policy(taps_per_request=0), slabs=60, pages=8)
    tokens = random_tokens(1, 200)
    double.complete(prompt(tokens), [])
    store = double.index._store
    double.complete(prompt(random_tokens(2, 440), cacheable=False), [])
    assert all(not n.pages for n in store.tree.nodes())
    for s in list(store.snapshots):
        store.remove_snapshot(s)
    double.complete(prompt(tokens), [])
    assert double.index.stats().counters["adopted_blocks"] == 3
    assert double.index.stats().blocks == 3


def test_growth_evicts_cache_only() -> None:
    """A lane grows into cached pages; when lanes hold all, it is Short and nothing is lost."""
    double = engine(policy(window_tokens=1), pages=8, lanes=2)
    double.complete(prompt(random_tokens(1, 200)), [])
    run = double.start(prompt(random_tokens(2, 200)), 300)
    double.prefill(run, 512)
    for token in range(8 * 64 - 200):
        assert isinstance(double.decode(run, token), Grown)
    short = double.decode(run, 1)
    assert short == Short(1, 0)
    assert run.lane.frontier == 512
    assert double.index.stats().counters["grow_short"] == 1


def test_short_tells_pages_that_only_copies_hold() -> None:
    """Pages pinned by a write come free by waiting: landing counts them."""
    double = engine(policy(window_tokens=1), pages=5, lanes=2, slabs=60)
    done = double.start(prompt(random_tokens(1, 130)), 1)
    double.prefill(done, 512)
    run = double.start(prompt(random_tokens(2, 60)), 200)
    double.prefill(run, 512)
    double.finish(done)
    short = double.index.grow(run.lane.id, 200, 0.0)
    assert isinstance(short, Short)
    assert short.landing >= short.missing > 0
    double.land_all()
    assert isinstance(double.index.grow(run.lane.id, 200, 0.0), Grown)


def test_a_suspended_lane_resumes_at_its_exact_frontier() -> None:
    """A suspension near the last snapshot still leaves an endpoint; n - 1 tokens are reused."""
    double = engine()
    tokens = random_tokens(1, 100)
    double.complete(prompt(tokens), [])
    run = double.start(prompt([*tokens, 7]), 64)
    double.prefill(run, 64)
    for token in range(5):
        double.decode(run, token)
    double.finish(run, Ending.SUSPENDED)
    resumed = double.start(prompt([*run.tokens, 9]), 64)
    assert resumed.lane.frontier == len(run.tokens) == 106
    assert double.index.stats().counters["suspended"] == 1


def test_suspension_takes_a_slot_whatever_it_is_worth() -> None:
    """With one snapshot slot and no host tier, the endpoint of a suspended lane displaces another."""
    double = engine(policy(taps_per_request=0), snapshots=1)
    other = random_tokens(1, 300)
    double.complete(prompt(other), [])
    run = double.start(prompt(random_tokens(2, 10)), 64)
    double.prefill(run, 64)
    double.finish(run, Ending.SUSPENDED)
    assert double.index.quote(prompt([*run.tokens, 9]), 1, 0.0).reuse == 10
    assert double.index.quote(prompt([*other, 9]), 1, 0.0).reuse == 0


def test_a_failed_lane_leaves_only_what_was_captured_before() -> None:
    """Failed: no endpoint, its earlier tap stays."""
    double = engine()
    tokens = random_tokens(1, 300)
    run = double.start(prompt(tokens, TapHint(130, HintKind.EXPLICIT)), 1)
    while not run.prefilled:
        double.prefill(run, 512)
    double.finish(run, Ending.FAILED)
    assert double.index.stats().counters["endpoints_skipped.failed"] == 1
    assert double.index.quote(prompt(tokens), 1, 0.0).reuse == 130
    balanced(double)


def test_an_endpoint_near_the_last_snapshot_is_skipped() -> None:
    """§7.7: fewer than 64 tokens past the deepest snapshot of the path are not worth an image."""
    double = engine()
    tokens = random_tokens(1, 100)
    double.complete(prompt(tokens), [])
    double.complete(prompt([*tokens, 1]), range(20))
    assert double.index.stats().counters["endpoints_skipped.near"] == 1


def test_an_output_boundary_is_a_snapshot_inside_the_reply() -> None:
    """§12.3: a tap at the frontier, mid-block; a second one there is a duplicate."""
    double = engine()
    run = double.start(prompt(random_tokens(1, 100)), 64)
    double.prefill(run, 512)
    for token in range(20):
        double.decode(run, token)
    double.tap(run)
    assert double.tap(run) == Skipped("duplicate")
    kinds = [s.kind for s in double.index._store.snapshots if s.frontier == 120]
    assert kinds == [SnapshotKind.OUTPUT_BOUNDARY]
    with pytest.raises(StateError, match="boundaries"):
        double.index.tap(run.lane.id, SnapshotKind.TAP, 0.0)


def test_a_tap_can_be_added_ahead_of_a_lane() -> None:
    """§12.2: accepted past the chunk given out, refused behind it and at the prompt's end."""
    double = engine()
    tokens = random_tokens(1, 300)
    run = double.start(prompt(tokens), 1)
    assert double.index.next_chunk(run.lane.id, 100, False, 0.0).end == 100
    assert not double.index.add_tap(run.lane.id, 100, 0.0)
    assert not double.index.add_tap(run.lane.id, 300, 0.0)
    assert double.index.add_tap(run.lane.id, 192, 0.0)
    while not run.prefilled:
        double.prefill(run, 512)
    assert double.index.quote(prompt([*tokens[:200], 1]), 1, 0.0).reuse == 192


def test_a_disabled_request_leaves_nothing() -> None:
    """§7.7: no block, no snapshot, no namespace; and it reuses nothing."""
    double = engine()
    tokens = random_tokens(1, 200)
    double.complete(prompt(tokens), range(64))
    before = double.index.stats()
    _, reused = double.complete(prompt(tokens, TapHint(100, HintKind.EXPLICIT), cacheable=False), range(64))
    after = double.index.stats()
    assert reused == 0
    assert (after.blocks, after.snapshots, after.pages_free) == (
        before.blocks,
        before.snapshots,
        before.pages_free,
    )


def test_namespaces_never_meet() -> None:
    """D14: the same prompt under another salt reuses nothing and is kept beside the first."""
    double = engine()
    tokens = random_tokens(1, 200)
    for salt in (b"", b"a"):
        _, reused = double.complete(prompt(tokens, salt=salt), range(64))
        assert reused == 0
    assert double.index.stats().blocks == 8
    assert double.complete(prompt([*tokens, *range(64), 1], salt=b"a"), [])[1] == 264


def test_commit_takes_the_prompts_own_tokens_only() -> None:
    """A wrong token, a wrong type, a frontier ahead or behind: each refused, and the lane is unharmed."""
    double = engine()
    tokens = random_tokens(1, 100)
    run = double.start(prompt(tokens), 10)
    lane, index = run.lane.id, double.index
    with pytest.raises(PromptError, match="not the prompt's"):
        index.commit(lane, tokens_of([tokens[0] + 1]), (1,), 0.0)
    with pytest.raises(PromptError, match="int64"):
        index.commit(lane, np.zeros(1, np.int64), (1,), 0.0)
    with pytest.raises(PromptError, match="pool pool0 is at 2"):
        index.commit(lane, tokens_of(tokens[:1]), (2,), 0.0)
    with pytest.raises(PromptError, match="there are 1 pools"):
        index.commit(lane, tokens_of(tokens[:1]), (1, 1), 0.0)
    with pytest.raises(PromptError, match="blocks mapped"):
        index.commit(lane, tokens_of([*tokens, *range(900)]), (1000,), 0.0)
    double.prefill(run, 512)
    assert run.prefilled


def test_calls_on_lanes_that_cannot_take_them_are_errors() -> None:
    """Unknown, ended, staged and prefilled lanes, and tickets not in flight."""
    double = engine()
    index = double.index
    with pytest.raises(LaneError, match="never staged"):
        index.grow(LaneId(1), 1, 0.0)
    run = double.stage(prompt(random_tokens(1, 10)), 4)
    assert isinstance(run, Run)
    with pytest.raises(StateError, match="staged"):
        index.next_chunk(run.lane.id, 4, False, 0.0)
    double.activate(run)
    with pytest.raises(StateError, match="activated before"):
        index.activate(run.lane.id, 0.0)
    with pytest.raises(StateError, match="cannot end unstaged"):
        index.finish(run.lane.id, Finish(Ending.UNSTAGED), 0.0)
    with pytest.raises(PromptError, match="budget is 0"):
        index.next_chunk(run.lane.id, 0, False, 0.0)
    double.prefill(run, 64)
    with pytest.raises(StateError, match="is prefilled"):
        index.next_chunk(run.lane.id, 4, False, 0.0)
    double.finish(run)
    with pytest.raises(LaneError, match="ended"):
        index.finish(run.lane.id, Finish(Ending.DONE), 0.0)
    with pytest.raises(TicketError, match="never issued"):
        index.landed(Ticket(999), True, 0.0)


def test_plans_are_numbered_in_order() -> None:
    """Tickets grow by one a plan, over all streams."""
    double = engine(slabs=60)
    seen: list[Plan] = []
    submit = double.submit

    def spy(plans: Plans) -> None:
        seen.extend(plans)
        submit(plans)

    double.submit = spy  # type: ignore[method-assign]
    double.complete(prompt(random_tokens(1, 300), TapHint(130, HintKind.EXPLICIT)), range(70))
    assert [p.ticket for p in seen] == list(range(1, len(seen) + 1))
    assert {p.stream for p in seen} == {Stream.COMPUTE, Stream.WRITE}


def test_a_client_that_echoes_gets_no_opener_tap() -> None:
    """After an endpoint resume the generation opener splits no chunk (§7.1)."""
    double = engine()
    first = random_tokens(1, 100)
    double.complete(prompt(first), range(75))
    turn = [*first, *range(75), *random_tokens(2, 200)]
    opener = TapHint(len(turn) - 2, HintKind.OPENER)
    run = double.start(prompt(turn, opener), 1)
    assert double.index.next_chunk(run.lane.id, 512, False, 0.0).end == len(turn)
    other = double.start(prompt(random_tokens(3, 375), opener), 1)
    assert double.index.next_chunk(other.lane.id, 512, False, 0.0).end == 373


def test_the_second_prompt_that_diverges_leaves_a_junction() -> None:
    """D13: with an endpoint past the fork, the next prompt taps the fork; the third resumes there."""
    double = engine(policy(taps_per_request=1), pages=100)
    common = random_tokens(1, 700)
    reuses = []
    for seed in (2, 3, 4):
        _, reused = double.complete(prompt([*common, *random_tokens(seed, 200)]), range(70), budget=2048)
        reuses.append(reused)
    assert reuses == [0, 0, 640]

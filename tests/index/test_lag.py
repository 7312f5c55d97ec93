"""A pool one token behind (design §2): blocks join late, aligned endpoints survive, columns are rewritten."""

from __future__ import annotations

from hpc_index.records import CopyKind, Ending, HintKind, SnapshotKind, TapHint
from tests.index.double import Run
from tests.index.strategies import engine, policy, prompt, random_tokens

LAGS = (0, 1)


def test_a_block_joins_when_both_pools_have_it() -> None:
    """At 128 tokens the lagging pool has 127: one block; one token later, two."""
    double = engine(policy(taps_per_request=0), lags=LAGS)
    run = double.start(prompt(random_tokens(1, 300)), 1)
    double.prefill(run, 128)
    assert double.index.stats().blocks == 1
    double.prefill(run, 1)
    assert double.index.stats().blocks == 2


def test_an_endpoint_at_an_aligned_frontier_has_a_whole_block_as_its_tail() -> None:
    """F = 128: block 1 is incomplete in the lagging pool, so it becomes the tail and is resumed from."""
    double = engine(policy(taps_per_request=0), lags=LAGS)
    tokens = random_tokens(1, 128)
    double.complete(prompt(tokens), [], budget=512)
    (endpoint,) = double.index._store.snapshots
    assert (endpoint.frontier, endpoint.anchor.depth, len(endpoint.tail)) == (128, 0, 4 * 64 + 8)
    _, reused = double.complete(prompt([*tokens, *random_tokens(2, 70)]), range(70))
    assert reused == 128


def test_activation_copies_the_columns_each_pool_has() -> None:
    """From 175 tokens: 47 columns of the text pool's tail and 46 of the lagging pool's."""
    double = engine(policy(taps_per_request=0), lags=LAGS)
    tokens = random_tokens(1, 175)
    double.complete(prompt(tokens), [], budget=512)
    run = double.stage(prompt([*tokens, 1, 2]), 1)
    assert isinstance(run, Run)
    (plan,) = double.index.activate(run.lane.id, 0.0)
    columns = {c.pool: c.columns for c in plan.copies if c.kind is CopyKind.PAGE_TO_PAGE}
    assert columns == {0: 47, 1: 46}


def test_an_aligned_resume_shares_one_page_less_of_the_lagging_pool() -> None:
    """From a tap at 128 whose next token follows again: 63 columns are copied, the text pool copies none."""
    double = engine(policy(), lags=LAGS)
    tokens = random_tokens(1, 300)
    double.complete(prompt(tokens, TapHint(128, HintKind.EXPLICIT)), [], budget=512)
    run = double.stage(prompt([*tokens[:200], 1]), 1)
    assert isinstance(run, Run)
    assert run.lane.frontier == 128
    (plan,) = double.index.activate(run.lane.id, 0.0)
    columns = {c.pool: c.columns for c in plan.copies if c.kind is CopyKind.PAGE_TO_PAGE}
    assert columns == {1: 63}
    shared = [n.pages for n in double.index._store.tree.nodes() if n.depth == 1]
    assert run.lane.pages[0][1] == shared[0][0]
    assert run.lane.pages[1][1] != shared[0][1]


def test_another_token_after_an_aligned_snapshot_makes_a_block_of_its_own() -> None:
    """The lagging page of block 1 depends on token 128: with another one both pages are copied, and the
    copy joins the tree beside the first, so that both branches stay exact.
    """
    double = engine(policy(), lags=LAGS)
    tokens = random_tokens(1, 300)
    double.complete(prompt(tokens, TapHint(128, HintKind.EXPLICIT)), [], budget=512)
    branch = [*tokens[:128], *random_tokens(2, 172)]
    run = double.stage(prompt(branch, TapHint(256, HintKind.EXPLICIT)), 1)
    assert isinstance(run, Run)
    (plan,) = double.index.activate(run.lane.id, 0.0)
    columns = {c.pool: c.columns for c in plan.copies if c.kind is CopyKind.PAGE_TO_PAGE}
    assert columns == {0: 64, 1: 63}
    run.active = True
    double.submit((plan,))
    while not run.prefilled:
        double.prefill(run, 512)
    double.finish(run)
    double.land_all()
    assert len([n for n in double.index._store.tree.nodes() if n.depth == 1]) == 2
    for old, reach in ((tokens, 128), (branch, 256)):
        _, reused = double.complete(prompt([*old[:290], *random_tokens(3, 30)]), [], budget=512)
        assert reused == reach


def test_a_tap_at_an_aligned_position_is_published_a_chunk_later() -> None:
    """§7.4: its anchor completes only when the lagging pool has the token after it."""
    double = engine(policy(), lags=LAGS)
    run = double.start(prompt(random_tokens(1, 300), TapHint(128, HintKind.EXPLICIT)), 1)
    double.prefill(run, 512)
    assert run.lane.frontier == 128
    assert double.index.stats().counters.get("taps_published", 0) == 0
    double.prefill(run, 512)
    (tap,) = double.index._store.snapshots
    assert (tap.frontier, tap.kind, tap.tail) == (128, SnapshotKind.BOUNDARY, b"")


def test_a_suspension_at_an_aligned_frontier_resumes_there() -> None:
    """Suspended right after an aligned resume, nothing decoded: the frontier is not lost."""
    double = engine(policy(taps_per_request=0), lags=LAGS)
    tokens = random_tokens(1, 128)
    run = double.start(prompt(tokens), 64)
    double.prefill(run, 512)
    double.finish(run, Ending.SUSPENDED)
    again = double.start(prompt([*tokens, 5]), 64)
    assert again.lane.frontier == 128
    double.finish(again, Ending.SUSPENDED)
    double.land_all()
    third = double.start(prompt([*tokens, 6]), 64)
    assert third.lane.frontier == 128
    double.prefill(third, 64)

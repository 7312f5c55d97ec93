"""Match, choice, capacity and reasons (§6.1-6.3, D2)."""

from __future__ import annotations

import numpy as np
import pytest

from hpc_index import CostModel
from hpc_index.admission import Candidate, rank
from hpc_index.errors import PromptError, StateError
from hpc_index.records import Ending, HintKind, PromptView, Readiness, Reason, Span, Stale, TapHint
from tests.index.double import Engine, Run, tokens_of
from tests.index.strategies import engine, policy, prompt, random_tokens

TOKENS = random_tokens(7, 522)


def explicit(*positions: int) -> tuple[TapHint, ...]:
    return tuple(TapHint(p, HintKind.EXPLICIT) for p in positions)


def two_taps(pages: int = 64) -> Engine:
    """Six cached blocks of TOKENS with snapshots at 128 and 320, and nothing else."""
    double = engine(policy(taps_per_request=2), pages=pages)
    double.complete(prompt(TOKENS[:384], *explicit(128, 320)), [])
    return double


def test_the_deepest_snapshot_below_the_end_is_chosen() -> None:
    """Prompt lengths 522 and 321 resume at 320; 320 needs one token left and resumes at 128."""
    index = two_taps().index
    assert index.quote(prompt(TOKENS), 1, 0.0).reuse == 384, "the endpoint"
    assert index.quote(prompt(TOKENS[:321]), 1, 0.0).reuse == 320
    assert index.quote(prompt(TOKENS[:320]), 1, 0.0).reuse == 128


def test_an_edit_falls_back_to_the_snapshot_before_it() -> None:
    """A changed token in block 3 leaves 3 blocks matched and the snapshot at 128."""
    edited = [*TOKENS[:200], 1, *TOKENS[201:]]
    quote = two_taps().index.quote(prompt(edited), 1, 0.0)
    assert (quote.reuse, quote.matched) == (128, 192)
    assert quote.stopped_by is Reason.NO_SNAPSHOT


def test_other_media_with_the_same_tokens_misses() -> None:
    """A media key on block 0 leaves nothing to match."""
    view = PromptView(tokens_of(TOKENS), np.full(9, 99, np.uint64))
    quote = two_taps().index.quote(view, 1, 0.0)
    assert (quote.reuse, quote.matched, quote.stopped_by) == (0, 0, Reason.EMPTY)


def test_nothing_resumes_inside_media() -> None:
    """A span around 320 leaves 128 as the only source below it."""
    view = PromptView(tokens_of(TOKENS[:330]), spans=(Span(310, 330),))
    assert two_taps().index.quote(view, 1, 0.0).reuse == 128


def test_a_shallower_snapshot_wins_when_the_deeper_costs_more_to_restore() -> None:
    """D2: 128 on the device and 27.2 ms of prefill beat 384 on the host, 40 ms of copy and 1.6 of prefill."""
    slow = CostModel(token_seconds=1e-4, host_bytes_per_second=1e5)
    double = engine(policy(), slow, slabs=60, snapshots=1)
    double.complete(prompt(TOKENS[:384]), [], budget=512)
    other = double.start(prompt([*TOKENS[:128], *random_tokens(1, 90)], *explicit(128)), 1)
    double.prefill(other, 512)
    double.finish(other, Ending.FAILED)
    double.land_all()
    quote = double.index.quote(prompt(TOKENS[:400]), 1, 0.0)
    assert (quote.reuse, quote.restore_bytes, quote.matched) == (128, 0, 384)
    assert quote.stopped_by is Reason.COST


def test_a_source_that_does_not_fit_is_passed_over() -> None:
    """All on the host, the endpoint needs a page for its tail beside the 5 of the lane: the root is taken."""
    double = engine(policy(window_tokens=8), pages=5, slabs=60)
    double.complete(prompt(TOKENS[:200]), [], budget=512)
    double.complete(prompt(random_tokens(1, 310), cacheable=False), [], budget=512)
    fits = double.index.quote(prompt(TOKENS[:250]), 1, 0.0)
    assert (fits.reuse, fits.stopped_by) == (200, Reason.DIVERGED)
    quote = double.index.quote(prompt(TOKENS[:300]), 1, 0.0)
    assert (quote.readiness, quote.reuse, quote.stopped_by) == (Readiness.READY, 0, Reason.CAPACITY)


def test_reasons_for_stopping() -> None:
    """Each reason at the smallest prompt that shows it."""
    index = two_taps().index
    assert index.quote(prompt(random_tokens(1, 100)), 1, 0.0).stopped_by is Reason.EMPTY
    assert index.quote(prompt([*TOKENS[:384], 1]), 1, 0.0).stopped_by is Reason.COMPLETE
    assert index.quote(prompt([*TOKENS[:384], *random_tokens(3, 80)]), 1, 0.0).stopped_by is Reason.DIVERGED
    refused = index.quote(prompt(TOKENS, cacheable=False), 1, 0.0)
    assert (refused.stopped_by, refused.reuse, refused.matched) == (Reason.NOT_CACHEABLE, 0, 0)
    assert index.quote(prompt(TOKENS, salt=b"tenant"), 1, 0.0).stopped_by is Reason.EMPTY


def test_reasons_for_not_starting() -> None:
    """No lane; no pages while a lane holds them; never."""
    double = engine(pages=6, lanes=1)
    too_long = double.index.quote(prompt(random_tokens(1, 6 * 64)), 1, 0.0)
    assert (too_long.readiness, too_long.blocked_by) == (
        Readiness.PERMANENTLY_INFEASIBLE,
        Reason.POOL_TOO_SMALL,
    )
    double.start(prompt(random_tokens(1, 200)), 10)
    busy = double.index.quote(prompt([1]), 1, 0.0)
    assert (busy.readiness, busy.blocked_by) == (Readiness.TEMPORARILY_BLOCKED, Reason.NO_LANE)
    double = engine(pages=6, lanes=2)
    double.start(prompt(random_tokens(1, 200)), 10)
    full = double.index.quote(prompt(random_tokens(2, 200)), 1, 0.0)
    assert (full.readiness, full.blocked_by) == (Readiness.TEMPORARILY_BLOCKED, Reason.NO_PAGES)


def test_pages_under_copy_come_free_by_waiting() -> None:
    """After a finish, blocks are pinned by their write: the next request is blocked until it lands."""
    double = engine(pages=4, slabs=60, lanes=2)
    run = double.start(prompt(random_tokens(1, 200)), 10)
    double.prefill(run, 256)
    double.finish(run)
    view = prompt(random_tokens(2, 200))
    assert double.index.quote(view, 1, 0.0).blocked_by is Reason.FILLING
    double.land_all()
    assert double.index.quote(view, 1, 0.0).readiness is Readiness.READY


def test_the_cushion_never_refuses_a_request() -> None:
    """256 tokens fill the pool of 4 blocks: the cushion is cut, and 257 tokens do not fit."""
    double = engine(policy(cushion_tokens=64), pages=4)
    assert double.index.quote(prompt(random_tokens(1, 250)), 6, 0.0).readiness is Readiness.READY
    assert double.index.quote(prompt(random_tokens(1, 250)), 7, 0.0).blocked_by is Reason.POOL_TOO_SMALL


def test_a_quote_whose_snapshot_went_is_stale_and_not_an_error() -> None:
    """Staging re-validates; what vanished since is re-planned, and nothing has changed."""
    double = two_taps(pages=12)
    view = prompt(TOKENS[:321])
    quote = double.index.quote(view, 1, 0.0)
    for s in list(double.index._store.snapshots):
        double.index._store.remove_snapshot(s)
    before = double.index.stats().pages_free
    assert isinstance(double.stage(view, 1, quote), Stale)
    assert double.index.stats().pages_free == before
    assert double.index.stats().counters["stale"] == 1
    assert isinstance(double.stage(view, 1), Run)


def test_misuse_of_a_quote_is_an_error() -> None:
    """A quote that was not ready cannot be staged, and max_new is not negative."""
    double = engine(pages=2)
    view = prompt(random_tokens(1, 300))
    with pytest.raises(StateError, match="permanently_infeasible"):
        double.index.stage(double.index.quote(view, 1, 0.0), view, 0.0)
    with pytest.raises(PromptError, match="max_new is -1"):
        double.index.quote(view, -1, 0.0)


def test_a_quote_changes_nothing() -> None:
    """Quoting any number of times leaves stats and epoch as they were."""
    double = two_taps()
    before = double.index.stats()
    epochs = {double.index.quote(prompt(TOKENS), 1, 0.0).epoch for _ in range(3)}
    assert len(epochs) == 1
    assert double.index.stats() == before


def test_equal_costs_are_ordered_by_bytes_then_depth() -> None:
    """D2: cheapest first; of equals the one that moves less, then the deeper."""

    def candidate(seconds: float, nbytes: int, frontier: int) -> Candidate:
        return Candidate(None, frontier, (), 0, nbytes, seconds)

    order = [candidate(1.0, 9, 5), candidate(2.0, 0, 64), candidate(2.0, 0, 0), candidate(2.0, 7, 128)]
    assert rank(order[::-1]) == tuple(order)


def test_matched_counts_the_tail_of_what_is_reused() -> None:
    """Three blocks and 8 tokens of a tail are cached and reused: 200 tokens matched, not 192."""
    double = engine(policy(taps_per_request=0))
    double.complete(prompt(TOKENS[:200]), [], budget=512)
    quote = double.index.quote(prompt(TOKENS[:250]), 1, 0.0)
    assert (quote.reuse, quote.matched) == (200, 200)


def test_a_stale_quote_changes_nothing() -> None:
    """Its pages went to another lane: what is cached stays, though evicting it would not have sufficed."""
    double = engine(policy(taps_per_request=0), pages=10, lanes=3)
    double.complete(prompt(TOKENS[:128]), [], budget=512)
    view = prompt(random_tokens(3, 400))
    quote = double.index.quote(view, 1, 0.0)
    double.start(prompt(random_tokens(4, 300), cacheable=False), 1)
    before = double.index.stats()
    assert isinstance(double.index.stage(quote, view, 0.0), Stale)
    after = double.index.stats()
    assert (after.blocks, after.pages_free) == (before.blocks, before.pages_free)


def test_a_quote_names_the_state_it_was_made_in() -> None:
    """Its epoch changes with whatever may change another quote: a lane staged, a snapshot lost."""
    double = engine(policy(taps_per_request=0))
    double.complete(prompt(TOKENS[:128]), [], budget=512)
    epochs = [double.index.quote(prompt(TOKENS), 1, 0.0).epoch]
    assert double.index.quote(prompt(TOKENS), 1, 0.0).epoch == epochs[0]
    double.index.stage(double.index.quote(prompt(TOKENS), 1, 0.0), prompt(TOKENS), 0.0)
    epochs.append(double.index.quote(prompt(TOKENS), 1, 0.0).epoch)
    double.index._store.remove_snapshot(next(iter(double.index._store.snapshots)))
    epochs.append(double.index.quote(prompt(TOKENS), 1, 0.0).epoch)
    assert epochs == sorted(set(epochs))

"""The host tier: what is written, what goes first, what is lost (§5.4, §9.3-9.4)."""

from __future__ import annotations

from hpc_index.records import CopyKind, Ending, HintKind, Stream, TapHint
from hpc_index.tree import Residency
from tests.index.double import Engine, Run
from tests.index.strategies import engine, policy, prompt, random_tokens

PLAIN = policy(taps_per_request=0)


def push_to_host(double: Engine) -> None:
    """Run a request that leaves nothing and needs every page."""
    pages = double.index.geometry.pools[0].pages
    double.complete(prompt(random_tokens(99, pages * 64 - 70), cacheable=False), [], budget=4096)


def test_a_finished_lane_writes_blocks_image_and_tail_in_one_plan() -> None:
    """200 tokens: three blocks and the tail to one slab each, the image to four; lowest slabs first."""
    double = engine(PLAIN, slabs=60)
    run = double.start(prompt(random_tokens(1, 200)), 1)
    double.prefill(run, 512)
    double.finish(run)
    (entry,) = double.open.values()
    assert entry.plan.stream is Stream.WRITE
    copies = {c.kind: c for c in entry.plan.copies}
    assert copies[CopyKind.PAGE_TO_SLAB].dst.tolist() == [0, 1, 2, 7]
    assert copies[CopyKind.SLOT_TO_SLABS].dst.tolist() == [3, 4, 5, 6]
    double.land_all()
    assert double.index.stats().counters["written_bytes"] == 8000


def test_what_left_the_device_comes_back_from_the_host() -> None:
    """A restore brings path, tail and image; the tokens reused are the same as on the device."""
    double = engine(PLAIN, slabs=60, pages=8, snapshots=1)
    tokens = random_tokens(1, 200)
    double.complete(prompt(tokens), [], budget=512)
    push_to_host(double)
    double.complete(prompt(random_tokens(2, 70)), [], budget=512)
    quote = double.index.quote(prompt([*tokens, 1]), 1, 0.0)
    assert (quote.reuse, quote.restore_bytes) == (200, 8000)
    run = double.stage(prompt([*tokens, 1]), 1)
    assert isinstance(run, Run)
    kinds = [c.kind for c in next(iter(double.open.values())).plan.copies]
    assert kinds == [CopyKind.SLAB_TO_PAGE, CopyKind.SLABS_TO_SLOT]
    double.activate(run)
    double.prefill(run, 64)
    double.land_all()
    assert double.index.stats().counters["restored_bytes"] == 8000


def test_the_least_recently_hit_snapshot_gives_up_its_slabs() -> None:
    """13 slabs hold two endpoints of 6: after a hit on the first, the third displaces the second."""
    double = engine(PLAIN, slabs=13, snapshots=3, pages=40)
    a, b, c = (random_tokens(i, 100) for i in range(3))
    double.complete(prompt(a), [], budget=512)
    double.complete(prompt(b), [], budget=512)
    assert double.index.stats().slabs_free == 1
    run = double.start(prompt([*a, 1]), 1)
    double.finish(run, Ending.CANCELLED)
    double.complete(prompt(c), [], budget=512)
    owners = [s for s in double.index._store.snapshots if s.host is Residency.RESIDENT]
    order = [s.id for s in double.index._store.snapshots]
    assert [s.id for s in owners] == [order[0], order[2]]
    assert double.index.stats().counters["evicted_host_snapshots"] == 1
    assert double.index.quote(prompt([*b, 1]), 1, 0.0).reuse == 100, "still complete on the device"


def test_dead_blocks_go_before_any_snapshot() -> None:
    """Blocks that no snapshot reaches are swept first, and then no snapshot has to go."""
    double = engine(PLAIN, slabs=14, snapshots=3, pages=40)
    dead = double.start(prompt(random_tokens(1, 260)), 1)
    double.prefill(dead, 512)
    double.finish(dead, Ending.FAILED)
    double.land_all()
    assert double.index.stats().slabs_used == 4
    double.complete(prompt(random_tokens(2, 100)), [], budget=512)
    double.complete(prompt(random_tokens(3, 100)), [], budget=512)
    counters = double.index.stats().counters
    assert counters["evicted_host_blocks"] == 2
    assert "evicted_host_snapshots" not in counters
    depths = sorted(n.depth for n in double.index._store.tree.nodes() if n.slab >= 0 and not n.live_below)
    assert depths == [0, 1], "the deepest went first"


def test_dead_blocks_never_evict_for_themselves() -> None:
    """A failed lane's unreachable blocks are written into free slabs only; the rest is counted."""
    double = engine(PLAIN, slabs=8, snapshots=2, pages=40)
    double.complete(prompt(random_tokens(1, 100)), [], budget=512)
    dead = double.start(prompt(random_tokens(2, 260)), 1)
    double.prefill(dead, 512)
    double.finish(dead, Ending.FAILED)
    double.land_all()
    counters = double.index.stats().counters
    assert counters["writes_skipped.dead_block"] == 2
    assert "evicted_host_snapshots" not in counters


def test_the_last_copy_takes_its_subtree_along() -> None:
    """§9.4: with no host tier, evicting blocks deletes the snapshots that resume through them."""
    double = engine(PLAIN, pages=8)
    tokens = random_tokens(1, 200)
    double.complete(prompt(tokens), [], budget=512)
    push_to_host(double)
    stats = double.index.stats()
    assert (stats.blocks, stats.snapshots, stats.slots_snapshot) == (0, 0, 0)
    assert stats.counters["lost_snapshots"] == 1
    assert not double.index._store.tree.roots


def test_a_backed_path_stays_when_an_unbacked_one_could_go() -> None:
    """Backed pages are consumed first, though they were used last; both paths stay reusable."""
    double = engine(PLAIN, pages=9, slabs=9, snapshots=3)
    old, new = random_tokens(1, 130), random_tokens(2, 130)
    double.complete(prompt(new), [], budget=512)
    double.complete(prompt(old), [], budget=512)
    states = {s.id: s.host for s in double.index._store.snapshots}
    assert sorted(h.value for h in states.values()) == ["absent", "resident"]
    double.complete(prompt(random_tokens(3, 300), cacheable=False), [], budget=512)
    for tokens in (old, new):
        assert double.index.quote(prompt([*tokens, 1]), 1, 0.0).reuse == 130


def test_a_prefetch_brings_host_blocks_and_drops_no_last_copy() -> None:
    """§6.6: at most the policy's blocks, into free or backed pages; one at a time."""
    double = engine(policy(taps_per_request=0, prefetch_blocks=2), slabs=60, pages=8)
    tokens = random_tokens(1, 200)
    double.complete(prompt(tokens), [], budget=512)
    push_to_host(double)
    view = prompt([*tokens, 1])
    plans = double.index.prefetch(view, 0.0)
    assert plans is not None
    double.submit(plans)
    assert double.index.prefetch(view, 0.0) is None
    assert double.index.stats().pages_filling == (2,)
    quote = double.index.quote(view, 1, 0.0)
    assert (quote.reuse, quote.restore_bytes) == (200, 2000), "what is on its way needs no second copy"
    double.land_all()
    assert double.index.stats().counters["prefetched_blocks"] == 2
    staged = double.stage(view, 1)
    assert isinstance(staged, Run)
    assert double.index.prefetch(prompt(random_tokens(5, 9)), 0.0) is None


def test_a_lane_may_map_blocks_that_a_prefetch_still_brings() -> None:
    """Its activation waits for both restores, and what it reads is right (§6.5)."""
    double = engine(policy(taps_per_request=0, prefetch_blocks=2), slabs=60, pages=8)
    tokens = random_tokens(1, 200)
    double.complete(prompt(tokens), [], budget=512)
    push_to_host(double)
    view = prompt([*tokens, 1])
    double.submit(double.index.prefetch(view, 0.0) or ())
    run = double.stage(view, 1)
    assert isinstance(run, Run)
    (plan,) = double.index.activate(run.lane.id, 0.0)
    assert len(plan.after) == 2
    double.submit((plan,))
    run.active = True
    double.prefill(run, 64)
    double.land_all()


def test_blocks_that_find_no_slab_stay_on_the_device() -> None:
    """While a tap's write pins all five slabs, the finishing lane's blocks are not written, and counted."""
    double = engine(slabs=5, pages=40)
    run = double.start(prompt(random_tokens(1, 400), TapHint(130, HintKind.EXPLICIT)), 1)
    double.prefill(run, 512)
    double.finish(run, Ending.CANCELLED)
    assert double.index.stats().counters["writes_skipped.block_no_slab"] == 2
    assert double.index.quote(prompt(run.tokens[:140]), 1, 0.0).reuse == 130


def test_a_tier_too_small_for_a_path_holds_its_beginning() -> None:
    """Six slabs for ten blocks that a snapshot needs: the first six are written, so that they are a path."""
    double = engine(PLAIN, slabs=6)
    double.complete(prompt(random_tokens(1, 640)), [], budget=1024)
    written = [n.depth for n in double.index._store.tree.nodes() if n.host is Residency.RESIDENT]
    assert written == [0, 1, 2, 3, 4, 5]
    assert double.index.stats().counters["writes_skipped.block_no_slab"] == 4


def test_a_snapshot_without_a_tail_takes_no_slab_for_one() -> None:
    """128 tokens: two blocks and an image of four slabs."""
    double = engine(PLAIN, slabs=60)
    double.complete(prompt(random_tokens(1, 128)), [], budget=512)
    assert double.index.stats().slabs_used == 6


def test_a_snapshot_on_its_way_back_keeps_its_slabs() -> None:
    """While a restore reads them, another request's write finds no room and is skipped (§10 invariant 6)."""
    double = engine(PLAIN, slabs=8, pages=12, snapshots=1)
    tokens = random_tokens(1, 200)
    double.complete(prompt(tokens), [], budget=512)
    push_to_host(double)
    (snapshot,) = double.index._store.snapshots
    double.index._store.drop_slot(snapshot)
    back = double.stage(prompt([*tokens, 1]), 1)
    assert isinstance(back, Run)
    other = double.start(prompt(random_tokens(3, 100)), 1)
    double.prefill(other, 512)
    double.finish(other)
    assert snapshot.host is Residency.RESIDENT
    assert double.index.stats().counters["writes_skipped.image_no_slab"] == 1
    double.activate(back)
    double.prefill(back, 64)

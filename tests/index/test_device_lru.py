"""The device LRU (§9.1): tail first, backed first, pinned never."""

from __future__ import annotations

from hpc_index.device_lru import DeviceLru
from hpc_index.tree import Node
from tests.index.strategies import engine, policy, prompt, random_tokens


def nodes(count: int) -> list[Node]:
    return [Node(None, i, i, b"") for i in range(count)]


def test_the_oldest_goes_first() -> None:
    """Entries leave in the order in which they were released."""
    lru, (a, b, c) = DeviceLru(), nodes(3)
    for entry in (b, a, c):
        lru.add(entry, backed=False)
    lru.discard(a)
    assert [lru.pop(), lru.pop(), lru.pop()] == [b, c, None]


def test_backed_entries_go_before_older_unbacked_ones() -> None:
    """A copy that can be restored goes before a last copy, however recent."""
    lru, (a, b, c) = DeviceLru(), nodes(3)
    lru.add(a, backed=False)
    lru.add(b, backed=True)
    lru.add(c, backed=True)
    assert lru.backed == 2
    assert [lru.pop(only_backed=True) for _ in range(3)] == [b, c, None]
    assert lru.pop() is a


def test_losing_the_host_copy_keeps_the_recency() -> None:
    """An entry that changes lists takes its old place there."""
    lru, (a, b, c) = DeviceLru(), nodes(3)
    lru.add(a, backed=True)
    lru.add(b, backed=False)
    lru.add(c, backed=True)
    lru.reback(a, backed=False)
    assert [lru.pop(), lru.pop(), lru.pop()] == [c, a, b]


def test_a_released_path_loses_its_deepest_block_first() -> None:
    """With no host tier, a new lane's pages come from the tail of the cached path, whose head stays."""
    double = engine(policy(taps_per_request=0), pages=6, snapshots=1)
    old = random_tokens(1, 256)
    double.complete(prompt(old), [])
    assert double.index.quote(prompt([*old, 1]), 0, 0.0).matched == 256
    double.complete(prompt(random_tokens(2, 150), cacheable=False), [])
    quote = double.index.quote(prompt([*old, 1]), 0, 0.0)
    assert quote.matched == 128
    assert double.index.stats().counters["evicted_device_blocks.unbacked"] >= 1
    assert double.index.stats().snapshots == 0, "the endpoint went with the block it anchored on"


def test_a_running_lane_is_never_evicted() -> None:
    """All pages of a lane stay, even when another request could use them."""
    double = engine(pages=4, lanes=2)
    run = double.start(prompt(random_tokens(1, 130)), 10)
    blocked = double.index.quote(prompt(random_tokens(2, 130)), 10, 0.0)
    assert blocked.blocked_by is not None
    double.prefill(run, 200)
    assert run.prefilled


def test_a_written_path_loses_its_deepest_block_first_too() -> None:
    """What a write pinned is released in the same order once it lands."""
    double = engine(policy(taps_per_request=0), pages=6, slabs=40)
    old = random_tokens(1, 256)
    double.complete(prompt(old), [], budget=512)
    double.complete(prompt(random_tokens(2, 100), cacheable=False), [], budget=512)
    resident = [bool(n.pages) for n in double.index._store.tree.nodes()]
    assert resident == [True, True, True, False]


def test_a_released_entry_is_as_recent_as_its_last_release() -> None:
    """Pinned and released again, it goes after what was released meanwhile."""
    lru, (a, b) = DeviceLru(), nodes(2)
    lru.add(a, backed=False)
    lru.add(b, backed=False)
    lru.discard(a)
    lru.add(a, backed=False)
    assert [lru.pop(), lru.pop(), lru.pop()] == [b, a, None]


def test_stale_items_do_not_pile_up() -> None:
    """A block that is hit for days takes a bounded place, and what else waits is still found."""
    lru, (a, b) = DeviceLru(), nodes(2)
    lru.add(b, backed=True)
    for _ in range(10_000):
        lru.add(a, backed=True)
        lru.discard(a)
    assert sum(len(heap) for heap in lru._heaps) < 100
    assert [lru.pop(), lru.pop()] == [b, None]

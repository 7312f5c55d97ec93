"""Bring host blocks of a waiting request into spare device pages (§6.6)."""

from __future__ import annotations

from hpc_index import admission
from hpc_index.cost import CostModel
from hpc_index.lanes import restore_copies
from hpc_index.records import Plans, PromptView, Stream
from hpc_index.store import Store
from hpc_index.tree import Residency

__all__ = ["prefetch"]


def prefetch(store: Store, cost: CostModel, prompt: PromptView) -> Plans | None:
    """Copy the first host-only blocks of the source that admission would choose; None if none can.

    Pages come free or from backed blocks, so that no last copy is dropped; the path is pinned meanwhile. One
    prefetch at a time. What it brings is cached like any block: Filling until it lands, then evictable.
    """
    if store.transfers.prefetching:
        return None
    best = admission.match(store, cost, prompt).candidates[0]
    absent = [n for n in best.nodes if n.device is Residency.ABSENT]
    if not absent:
        return None
    hold = store.hold(best.nodes, best.snapshot)
    room = min(len(pages) for pages in store.pages) + store.lru.backed
    absent = absent[: min(room, store.policy.prefetch_blocks)]
    if not absent or not store.make_room([len(absent)] * len(store.pages), only_backed=True):
        store.release(hold)
        return None
    for node in absent:
        node.pages, node.device = store.take_bundle(), Residency.FILLING
    plan, flight = store.transfers.launch(Stream.RESTORE, restore_copies(store, absent, None))
    for node in absent:
        node.filling = plan.ticket
    flight.hold, flight.fills, flight.prefetch = hold, tuple(absent), True
    flight.nbytes = len(absent) * store.block_bytes
    store.counters.count("prefetched_blocks", len(absent))
    store.counters.count("restored_bytes", flight.nbytes)
    store.epoch += 1
    return (plan,)

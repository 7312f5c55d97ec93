"""Who gives up a device slot for a new snapshot (§9.2).

The order: a free slot; the new snapshot's own predecessors, then the slot whose owner was superseded
longest ago; then the least recently hit owner, whether it has a host copy or not. §9.2 orders the last step
by value, which comes with the value policy; until then recency decides, which never lets a stale owner keep
a slot for good.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_index.snapshots import Snapshot, is_shared
from hpc_index.store import Store

__all__ = ["make_slot_room", "take_slot"]


def take_slot(store: Store, lineage: Sequence[Snapshot | None]) -> int | None:
    """A slot for a new snapshot whose predecessors are `lineage`; None if every owner is pinned.

    A predecessor counts as superseded for this request only (D20): the mark becomes permanent when the new
    snapshot is published.
    """
    if not make_slot_room(store, lineage):
        return None
    return store.slots.take_for_snapshot()


def make_slot_room(store: Store, lineage: Sequence[Snapshot | None]) -> bool:
    """Make sure that one more slot may belong to a snapshot. False if it cannot be."""
    if store.slots.room:
        return True
    owners = [s for s in store.snapshots if s.slot >= 0 and not s.pins]
    if not owners:
        return False
    own = {s.id for s in lineage if s is not None and not is_shared(s)}
    superseded = [s for s in owners if s.superseded or s.id in own]
    if superseded:
        victim, why = min(superseded, key=lambda s: (s.superseded or s.last_hit, s.id)), "superseded"
    else:
        victim, why = min(owners, key=lambda s: s.last_hit), "least_recent"
    store.counters.count(f"evicted_slots.{why}")
    store.drop_slot(victim)
    return store.slots.room

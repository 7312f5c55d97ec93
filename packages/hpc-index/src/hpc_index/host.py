"""Host slabs: what is written and what goes to make room (§5.4, §9.3).

The plain rule. Room comes first from blocks that no snapshot can reach, deepest first: they can never give a
hit (§9.3 step 1). Then from the least recently hit snapshot that nothing is copying; if it is complete on
the device it only gives up its host copy. Supersession plays no part here, only in the order of device
slots. Blocks that no snapshot reaches are written only into slabs that are free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpc_index.ids import Ticket
from hpc_index.records import Copy, CopyKind, Plan, Stream, int32
from hpc_index.snapshots import Snapshot
from hpc_index.store import Store
from hpc_index.tree import Node, Residency

__all__ = ["allocate", "write_back"]


def allocate(store: Store, count: int) -> list[int] | None:
    """`count` slabs, lowest first, evicting if need be; None if pinned entries hold too many."""
    if count > store.slabs.size:
        return None
    while len(store.slabs) < count:
        if not _sweep_dead(store, count) and not _evict_snapshot(store):
            return None
    return store.slabs.take(count)


def write_back(
    store: Store,
    path: Sequence[Node],
    blocks: Sequence[Node],
    snapshot: Snapshot | None,
    after: tuple[Ticket, ...],
) -> Plan | None:
    """One Write plan for those of `blocks` that are only on the device, and for `snapshot`.

    path: the whole path of both; it is pinned until the plan lands. Blocks come in order from the root and
    are written as far as slabs go, so that what is written is a path. What finds no slab stays on the device
    only and is counted.
    """
    if not store.slabs.size:
        return None
    # Pinned before slabs are looked for: making room must not drop what is about to be written.
    hold = store.hold(path, snapshot)
    wanted = [n for n in blocks if n.host is Residency.ABSENT and n.device is Residency.RESIDENT]
    live = [n for n in wanted if n.live_below]
    dead = [n for n in wanted if not n.live_below]
    pieces = 0
    if snapshot is not None and snapshot.host is Residency.ABSENT and snapshot.slot >= 0:
        pieces = store.geometry.image_slabs + (1 if snapshot.tail else 0)
    slabs = allocate(store, len(live) + pieces)
    if slabs is None and pieces:
        store.counters.count("writes_skipped.image_no_slab")
        pieces = 0
        slabs = allocate(store, len(live))
    while slabs is None:
        live.pop()
        store.counters.count("writes_skipped.block_no_slab")
        slabs = allocate(store, len(live))
    image = slabs[len(live) :]
    free = min(len(dead), len(store.slabs))
    if free < len(dead):
        store.counters.count("writes_skipped.dead_block", len(dead) - free)
    written = live + dead[:free]
    homes = slabs[: len(live)] + store.slabs.take(free)
    if not written and not pieces:
        store.release(hold)
        return None
    copies = _copies(store, written, homes, snapshot if pieces else None, image)
    plan, flight = store.transfers.launch(Stream.WRITE, copies, after)
    flight.hold, flight.fills, flight.image = hold, tuple(written), pieces > 0
    flight.nbytes = store.block_bytes * len(written)
    for node, slab in zip(written, homes, strict=True):
        node.slab, node.host = slab, Residency.FILLING
    if pieces and snapshot is not None:
        snapshot.slabs, snapshot.host = tuple(image), Residency.FILLING
        flight.nbytes += store.geometry.image_bytes + (store.block_bytes if snapshot.tail else 0)
    return plan


def _copies(
    store: Store, blocks: list[Node], homes: list[int], snapshot: Snapshot | None, image: list[int]
) -> list[Copy]:
    copies = []
    pieces = store.geometry.image_slabs
    for pool in range(len(store.pages)):
        src = [n.pages[pool] for n in blocks]
        dst = list(homes)
        if snapshot is not None and snapshot.tail:
            src.append(snapshot.pages[pool])
            dst.append(image[pieces])
        if src:
            copies.append(
                Copy(CopyKind.PAGE_TO_SLAB, np.array(src, np.int32), np.array(dst, np.int32), pool=pool)
            )
    if snapshot is not None:
        copies.append(Copy(CopyKind.SLOT_TO_SLABS, int32(snapshot.slot), np.array(image[:pieces], np.int32)))
    return copies


def _sweep_dead(store: Store, count: int) -> bool:
    """Free slabs of dead blocks, deepest first, until `count` are free. False if none was freed."""
    dead = [n for n in store.tree.nodes() if n.host is Residency.RESIDENT and not n.live_below and not n.held]
    dead.sort(key=lambda n: -n.depth)
    freed = False
    for node in dead:
        if len(store.slabs) >= count:
            break
        if node.host is Residency.RESIDENT:  # it may have gone with a block above it
            store.drop_host_block(node)
            store.counters.count("evicted_host_blocks")
            freed = True
    return freed


def _evict_snapshot(store: Store) -> bool:
    """Drop the host copy of the least recently hit snapshot. False if all are pinned."""
    victims = [s for s in store.snapshots if s.host is Residency.RESIDENT and not s.pins]
    if not victims:
        return False
    store.drop_host_image(min(victims, key=lambda s: s.last_hit))
    store.counters.count("evicted_host_snapshots")
    return True

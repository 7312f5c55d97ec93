"""Snapshots: recurrent states at exact frontiers, anchored in the tree of blocks (§5.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from hpc_index.ids import SnapshotId, Ticket
from hpc_index.keys import BlockKeys
from hpc_index.records import SnapshotKind
from hpc_index.tree import Node, Residency

__all__ = ["Snapshot", "SnapshotTable"]


@attrs.define(eq=False)
class Snapshot:
    """The state after tokens [0, frontier), with the KV of its partial last block.

    anchor: last full block below the frontier, or the namespace's root.
    tail: exact key of the tokens past the anchor (tokens, then media key), empty for none. A tail is
        shorter than a block, or one whole block where a pool lags (design §2).
    slot: device image, -1 if none. pages: tail's, one a pool, while tail_device is not ABSENT.
    slabs: host image, and the tail's slab last; all of it is written and dropped together.
    pins: copies in flight that need it; its whole path is pinned with it.
    superseded: when its lineage moved past it (0: retained). hits, last_hit: since publication.
    broken: its capture failed; never matched, removed with its last pin.
    lru, backed: the tail pages' place in the device LRU.
    """

    id: SnapshotId
    kind: SnapshotKind
    anchor: Node
    frontier: int
    tail: bytes
    slot: int
    pages: tuple[int, ...]
    tail_device: Residency
    slabs: tuple[int, ...] = ()
    host: Residency = Residency.ABSENT
    filling: Ticket | None = None
    pins: int = 0
    superseded: int = 0
    hits: int = 0
    last_hit: int = 0
    broken: bool = False
    lru: int = 0
    backed: bool = False

    @property
    def tail_on_device(self) -> bool:
        """Whether the tail (if any) is, or is about to be, on the device."""
        return not self.tail or self.tail_device in (Residency.RESIDENT, Residency.FILLING)

    @property
    def valid(self) -> bool:
        """Whether image and tail each have a copy (§5.3); its path's nodes have one while they exist."""
        hosted = self.host is Residency.RESIDENT
        return not self.broken and (self.slot >= 0 or hosted) and (self.tail_on_device or hosted)


class SnapshotTable:
    """Every snapshot by id, the lists at its anchors, and the liveness of the blocks above."""

    def __init__(self) -> None:
        self.by_id: dict[SnapshotId, Snapshot] = {}
        self._ids = 0
        self._clock = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self.by_id.values())

    def tick(self) -> int:
        """A moment later than all before: orders hits and supersessions."""
        self._clock += 1
        return self._clock

    def at(self, anchor: Node, tail: bytes) -> Snapshot | None:
        """The one snapshot of that anchor and tail."""
        for snapshot in anchor.snapshots:
            if snapshot.tail == tail:
                return snapshot
        return None

    def add(
        self,
        kind: SnapshotKind,
        anchor: Node,
        frontier: int,
        tail: bytes,
        slot: int,
        pages: tuple[int, ...],
    ) -> Snapshot:
        """A new snapshot with its image in `slot` and its tail in `pages`; every block above becomes live."""
        self._ids += 1
        snapshot = Snapshot(
            id=SnapshotId(self._ids),
            kind=kind,
            anchor=anchor,
            frontier=frontier,
            tail=tail,
            slot=slot,
            pages=pages,
            tail_device=Residency.RESIDENT if tail else Residency.ABSENT,
            last_hit=self.tick(),
        )
        self.by_id[snapshot.id] = snapshot
        anchor.snapshots.append(snapshot)
        for node in anchor.up():
            node.live_below += 1
        return snapshot

    def discard(self, snapshot: Snapshot) -> None:
        """Forget a snapshot; its copies were dropped before."""
        del self.by_id[snapshot.id]
        snapshot.anchor.snapshots.remove(snapshot)
        for node in snapshot.anchor.up():
            node.live_below -= 1

    def hit(self, snapshot: Snapshot) -> None:
        """A request resumes from it: it is retained again (§9.3)."""
        snapshot.hits += 1
        snapshot.last_hit = self.tick()
        snapshot.superseded = 0

    def supersede(self, snapshot: Snapshot) -> None:
        """Its lineage has a deeper snapshot. A shared Boundary stays (§9.3)."""
        if not snapshot.superseded and not is_shared(snapshot):
            snapshot.superseded = self.tick()


def is_shared(snapshot: Snapshot) -> bool:
    """Whether a Boundary has more than one conversation below it: a fork in the blocks that continue it."""
    if snapshot.kind is not SnapshotKind.BOUNDARY:
        return False
    tokens = snapshot.tail[:-8]
    below = [c for twins in snapshot.anchor.children.values() for c in twins if c.key.startswith(tokens)]
    while len(below) == 1:
        below = [c for twins in below[0].children.values() for c in twins]
    return len(below) > 1


def snapshots_on(path: Sequence[Node], root: Node, keys: BlockKeys, frontier: int) -> Iterator[Snapshot]:
    """Valid snapshots at or before `frontier` on a path whose tokens `keys` holds, deepest anchor first."""
    for anchor in (*reversed(path), root):
        begin = keys.block * (anchor.depth + 1)
        for snapshot in anchor.snapshots:
            if snapshot.frontier > frontier or not snapshot.valid:
                continue
            if not snapshot.tail or snapshot.tail == keys.between(begin, snapshot.frontier):
                yield snapshot

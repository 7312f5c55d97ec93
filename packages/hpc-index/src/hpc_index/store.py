"""What is kept and where: tree, snapshots, pages, slots and slabs, and the moves between them.

Every change of residency and every removal goes through here, so that ledgers, LRU and liveness stay in
step. Pins are path wide: whatever needs a block needs all above it, so an entry that nothing holds has
nothing held below it, and removing it removes only what nobody uses (§9.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpc_index.device_lru import DeviceLru, Entry
from hpc_index.ledger import Counters, FreeList, SlotLedger
from hpc_index.policy import Policy
from hpc_index.records import Geometry
from hpc_index.snapshots import Snapshot, SnapshotTable
from hpc_index.transfers import Hold, Transfers
from hpc_index.tree import Node, Residency, Tree

__all__ = ["Store"]


class Store:
    """Owner of all cache state except the lanes."""

    def __init__(self, geometry: Geometry, policy: Policy) -> None:
        self.geometry = geometry
        self.policy = policy
        self.block = geometry.block
        self.lead = max(pool.lag for pool in geometry.pools)
        self.block_bytes = sum(pool.page_bytes for pool in geometry.pools)
        self.tree = Tree(policy.hash_seed)
        self.snapshots = SnapshotTable()
        self.pages = tuple(FreeList(f"page of pool {p.name}", p.pages) for p in geometry.pools)
        self.slots = SlotLedger(geometry.slots, geometry.snapshot_slots)
        self.slabs = FreeList("slab", geometry.slabs)
        self.lru = DeviceLru()
        self.transfers = Transfers()
        self.counters = Counters()
        self.epoch = 0

    # Pins

    def hold(self, nodes: Iterable[Node], snapshot: Snapshot | None) -> Hold:
        """Pin a whole path, and a snapshot anchored on it."""
        hold = Hold(tuple(nodes), snapshot)
        for node in hold.nodes:
            node.pins += 1
            self.lru.discard(node)
        if snapshot is not None:
            snapshot.pins += 1
            self.lru.discard(snapshot)
        return hold

    def release(self, hold: Hold) -> None:
        """Undo `hold`, deepest first. A hold is released once; afterwards it is empty."""
        nodes, snapshot = hold.nodes, hold.snapshot
        hold.nodes, hold.snapshot = (), None
        if snapshot is not None:
            snapshot.pins -= 1
            self.settle_snapshot(snapshot)
        for node in reversed(nodes):
            node.pins -= 1
            self.settle(node)

    def settle(self, node: Node) -> None:
        """Nothing may need this block any more: make it evictable, or drop its broken copy."""
        if node.held:
            return
        if node.device is Residency.BROKEN:
            self._free_pages(node)
        elif node.device is Residency.RESIDENT and not node.lru:
            self.lru.add(node, backed=node.host is Residency.RESIDENT)

    def settle_snapshot(self, snapshot: Snapshot) -> None:
        """Nothing may be copying it any more: make its tail evictable, or remove it if it broke."""
        if snapshot.pins or snapshot.id not in self.snapshots.by_id:
            return
        if snapshot.broken:
            self.remove_snapshot(snapshot)
        elif snapshot.tail_device is Residency.RESIDENT and not snapshot.lru:
            self.lru.add(snapshot, backed=snapshot.host is Residency.RESIDENT)

    # Device pages

    def make_room(self, need: Sequence[int], *, only_backed: bool = False) -> bool:
        """Evict from the device LRU until each pool has `need` free pages (§6.4); False if it cannot."""
        while any(len(pages) < n for pages, n in zip(self.pages, need, strict=True)):
            entry = self.lru.pop(only_backed=only_backed)
            if entry is None:
                return False
            self._evict(entry)
        return True

    def missing(self, need: Sequence[int], spared: int = 0) -> int:
        """Pages short in the worst pool if all evictable entries but `spared` went; 0 if it fits."""
        evictable = len(self.lru) - spared
        return max(0, max(n - len(p) - evictable for p, n in zip(self.pages, need, strict=True)))

    def landing(self) -> int:
        """Pages of a pool that only copies in flight hold: they come free, or evictable, by waiting."""
        nodes: set[Node] = set()
        tails: set[Snapshot] = set()
        for flight in self.transfers.open.values():
            nodes.update(n for n in flight.hold.nodes if n.refs == 0 and n.pages)
            if flight.hold.snapshot is not None and flight.hold.snapshot.pages:
                tails.add(flight.hold.snapshot)
        return len(nodes) + len(tails)

    def take_bundle(self) -> tuple[int, ...]:
        """One free page of every pool."""
        return tuple(pages.take(1)[0] for pages in self.pages)

    def give_bundle(self, bundle: Sequence[int]) -> None:
        """Return one page of every pool; an empty bundle is none."""
        if bundle:
            for pages, page in zip(self.pages, bundle, strict=True):
                pages.give((page,))

    def _free_pages(self, node: Node) -> None:
        self.give_bundle(node.pages)
        node.pages, node.device, node.filling = (), Residency.ABSENT, None

    def _evict(self, entry: Entry) -> None:
        """Drop a device copy. If it was the last one, what depends on it goes too (§9.4)."""
        backed = entry.host is Residency.RESIDENT
        self.counters.count(f"evicted_device_blocks.{'backed' if backed else 'unbacked'}")
        if not backed:
            if isinstance(entry, Node):
                self.remove_subtree(entry)
            else:
                self.remove_snapshot(entry)
        elif isinstance(entry, Node):
            self._free_pages(entry)
        else:
            self.drop_tail(entry)

    def drop_tail(self, snapshot: Snapshot) -> None:
        """Free a snapshot's tail pages; its host copy stays."""
        self.lru.discard(snapshot)
        self.give_bundle(snapshot.pages)
        snapshot.pages, snapshot.tail_device, snapshot.filling = (), Residency.ABSENT, None

    # Host slabs

    def drop_host_block(self, node: Node) -> None:
        """Free a block's slab; without a device copy the block and all below it go."""
        if node.device is Residency.ABSENT:
            self.remove_subtree(node)
            return
        self.slabs.give((node.slab,))
        node.slab, node.host = -1, Residency.ABSENT
        self.lru.reback(node, backed=False)

    def drop_host_image(self, snapshot: Snapshot) -> bool:
        """Free a snapshot's slabs. False if those were a last copy and the snapshot went with them."""
        self.slabs.give(snapshot.slabs)
        snapshot.slabs, snapshot.host = (), Residency.ABSENT
        self.lru.reback(snapshot, backed=False)
        if snapshot.valid:
            return True
        self.remove_snapshot(snapshot)
        return False

    # Slots

    def drop_slot(self, snapshot: Snapshot) -> None:
        """Free a snapshot's device image; without a host copy the snapshot goes."""
        if snapshot.host is Residency.RESIDENT:
            self.slots.give_from_snapshot(snapshot.slot)
            snapshot.slot = -1
        else:
            self.remove_snapshot(snapshot)

    # Removal

    def remove_snapshot(self, snapshot: Snapshot, why: str = "lost") -> None:
        """Drop every copy of a snapshot and the snapshot."""
        self.counters.count(f"{why}_snapshots")
        self.epoch += 1
        self.lru.discard(snapshot)
        if snapshot.slot >= 0:
            self.slots.give_from_snapshot(snapshot.slot)
            snapshot.slot = -1
        self.give_bundle(snapshot.pages)
        self.slabs.give(snapshot.slabs)
        snapshot.pages, snapshot.slabs = (), ()
        snapshot.tail_device = snapshot.host = Residency.ABSENT
        self.snapshots.discard(snapshot)
        if snapshot.anchor.parent is None:
            self.tree.close_root(snapshot.anchor)

    def remove_subtree(self, top: Node) -> None:
        """Delete a block that lost its last copy, all below it and every snapshot anchored there (§9.4)."""
        self.epoch += 1
        for node in list(top.walk()):
            for snapshot in list(node.snapshots):
                self.remove_snapshot(snapshot)
            self.lru.discard(node)
            self.give_bundle(node.pages)
            if node.slab >= 0:
                self.slabs.give((node.slab,))
            node.pages, node.slab = (), -1
            node.device = node.host = Residency.ABSENT
            self.counters.count("removed_blocks")
        self.tree.detach(top)

"""§10 as code: every ledger balanced, every count recomputed from what it counts.

For tests, `hpc inspect --verify` and a debug flag of the server. Costs time in proportion to the whole index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hpc_index.errors import InvariantError
from hpc_index.index import PrefixIndex
from hpc_index.lane_state import LaneState
from hpc_index.ledger import FreeList, SlotLedger
from hpc_index.store import Store
from hpc_index.transfers import Hold
from hpc_index.tree import Node, Residency

__all__ = ["check_invariants"]


def check_invariants(index: PrefixIndex) -> None:
    """Raise InvariantError, naming what is wrong, if a rule of §10 does not hold."""
    store = index._store
    lanes = tuple(index._lanes.values())
    _check_tree(store, lanes)
    _check_snapshots(store)
    _check_pages(store, lanes)
    _check_slots(store, lanes)
    _check_slabs(store)
    _check_lanes(store, lanes)
    _check_taps(store, lanes)


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def _holds(store: Store, lanes: Iterable[LaneState]) -> list[Hold]:
    return [f.hold for f in store.transfers.open.values()] + [s.hold for s in lanes]


def _check_tree(store: Store, lanes: Iterable[LaneState]) -> None:
    refs = Counter(node for state in lanes for node in state.path)
    holds = _holds(store, lanes)
    pins = Counter(node for hold in holds for node in hold.nodes)
    live: Counter[Node] = Counter()
    for snapshot in store.snapshots:
        live.update(snapshot.anchor.up())
    filling = {n: f.ticket for f in store.transfers.open.values() for n in f.fills}
    count = evictable = backed = 0
    for node in store.tree.nodes():
        count += 1
        where = f"block {node.depth}"
        _need(node.refs == refs[node], f"{where}: refs {node.refs}, {refs[node]} lanes map it")
        _need(node.pins == pins[node], f"{where}: pins {node.pins}, {pins[node]} holds have it")
        _need(node.live_below == live[node], f"{where}: live_below {node.live_below}, is {live[node]}")
        _need(
            bool(node.pages) is (node.device is not Residency.ABSENT), f"{where}: pages and residency differ"
        )
        _need((node.slab >= 0) is (node.host is not Residency.ABSENT), f"{where}: slab and residency differ")
        _need(
            node.device is Residency.RESIDENT or node.host is Residency.RESIDENT,
            f"{where}: no copy ({node.device.value} on the device, {node.host.value} on the host)",
        )
        if node.device is Residency.FILLING:
            _need(filling.get(node) == node.filling, f"{where}: filling, but no open restore brings it")
        if node.host is Residency.FILLING:
            _need(node in filling, f"{where}: its host copy is filling, but no open write makes it")
        if node.refs:
            _need(node.device is not Residency.ABSENT, f"{where}: on a lane's path without device copy")
        parent = node.parent
        if parent is not None and parent.parent is not None and node.held:
            _need(parent.held, f"{where}: held below a block that is not")
        may_go = not node.held and node.device is Residency.RESIDENT
        _need(
            bool(node.lru) is may_go, f"{where}: evictable is {may_go}, in the device LRU is {bool(node.lru)}"
        )
        if node.lru:
            evictable += 1
            backed += node.backed
            _need(node.backed is (node.host is Residency.RESIDENT), f"{where}: in the wrong LRU list")
        for twins in node.children.values():
            exact = {(t.key, t.ahead) for t in twins}
            _need(len(exact) == len(twins), f"{where}: two equal children")
    _need(count == store.tree.blocks, f"{count} blocks in the tree, {store.tree.blocks} counted")
    for snapshot in store.snapshots:
        evictable += bool(snapshot.lru)
        backed += bool(snapshot.lru and snapshot.backed)
    _need(
        len(store.lru) == evictable, f"{evictable} evictable entries, the device LRU counts {len(store.lru)}"
    )
    _need(store.lru.backed == backed, f"{backed} backed entries, the device LRU counts {store.lru.backed}")
    for salt, root in store.tree.roots.items():
        _need(root.key == salt, "a root under another namespace's name")
        held = sum(1 for s in lanes if s.root is root)
        _need(root.refs == held, f"a root has refs {root.refs}, {held} lanes run in it")
        used = bool(root.children or root.snapshots or root.refs)
        _need(used, "a namespace of which nothing is left was kept")


def _check_snapshots(store: Store) -> None:
    pins = Counter(f.hold.snapshot for f in store.transfers.open.values() if f.hold.snapshot is not None)
    alive = set(store.tree.nodes()) | set(store.tree.roots.values())
    for s in store.snapshots:
        where = f"snapshot {s.id} at {s.frontier}"
        _need(s.valid or s.broken, f"{where}: not valid")
        _need(s.anchor in alive and s in s.anchor.snapshots, f"{where}: its anchor is gone")
        twins = [t for t in s.anchor.snapshots if t.tail == s.tail]
        _need(len(twins) == 1, f"{where}: published twice")
        length = max(0, len(s.tail) - 8) // 4
        begin = store.block * (s.anchor.depth + 1)
        _need(s.frontier == begin + length, f"{where}: anchor at {begin} and a tail of {length}")
        _need(length <= store.block and not s.frontier % store.geometry.unit, f"{where}: not a frontier")
        _need(
            bool(s.pages) is (s.tail_device is not Residency.ABSENT),
            f"{where}: tail pages and residency differ",
        )
        _need(bool(s.slabs) is (s.host is not Residency.ABSENT), f"{where}: slabs and residency differ")
        _need(s.pins >= pins[s], f"{where}: pins {s.pins}, {pins[s]} flights need it")
        may_go = not s.pins and s.tail_device is Residency.RESIDENT
        _need(bool(s.lru) is may_go, f"{where}: tail evictable is {may_go}, in the LRU is {bool(s.lru)}")
        if s.lru:
            _need(s.backed is (s.host is Residency.RESIDENT), f"{where}: tail in the wrong LRU list")


def _check_owned(what: str, size: int, free: FreeList | SlotLedger, owned: list[tuple[int, str]]) -> None:
    """Invariant 1: every id is free or has exactly one owner."""
    owner: dict[int, str] = {}
    for item, who in owned:
        _need(item not in owner, f"{what} {item} belongs to {owner.get(item)} and to {who}")
        _need(item not in free, f"{what} {item} belongs to {who} and is free")
        owner[item] = who
    lost = [i for i in range(size) if i not in owner and i not in free]
    _need(not lost, f"{what}s {lost[:8]} have no owner and are not free")


def _check_pages(store: Store, lanes: Iterable[LaneState]) -> None:
    for i, pages in enumerate(store.pages):
        owned = [(n.pages[i], f"block {n.depth}") for n in store.tree.nodes() if n.pages]
        owned += [(s.pages[i], f"the tail of snapshot {s.id}") for s in store.snapshots if s.pages]
        for state in lanes:
            owned += [(p, f"lane {state.lane.id}") for p in state.private_pages(i)]
            owned += [(c.pages[i], f"a capture of lane {state.lane.id}") for c in state.pending if c.pages]
        _check_owned(pages.what, pages.size, pages, owned)


def _check_slots(store: Store, lanes: Iterable[LaneState]) -> None:
    snapshot = [(s.slot, f"snapshot {s.id}") for s in store.snapshots if s.slot >= 0]
    active = [(f.slot, f"restore {f.ticket}") for f in store.transfers.open.values() if f.slot >= 0]
    for state in lanes:
        name = f"lane {state.lane.id}"
        active.append((state.lane.slot, name))
        snapshot += [(c.slot, f"a capture of {name}") for c in state.pending]
        snapshot += [(slot, f"a tap of {name}") for slot in state.reserved.values()]
    _check_owned("slot", store.slots.size, store.slots, active + snapshot)
    _need(len(snapshot) == store.slots.held, f"{len(snapshot)} snapshot slots, {store.slots.held} counted")
    _need(store.slots.held <= store.slots.limit, f"{store.slots.held} snapshot slots of {store.slots.limit}")


def _check_slabs(store: Store) -> None:
    owned = [(n.slab, f"block {n.depth}") for n in store.tree.nodes() if n.slab >= 0]
    owned += [(slab, f"snapshot {s.id}") for s in store.snapshots for slab in s.slabs]
    _check_owned("slab", store.slabs.size, store.slabs, owned)


def _check_lanes(store: Store, lanes: Iterable[LaneState]) -> None:
    for state in lanes:
        name = f"lane {state.lane.id}"
        _need(all(t in store.transfers.open for t in state.waits), f"{name} waits for a landed restore")
        for depth, node in enumerate(state.path):
            parent = state.path[depth - 1] if depth else state.root
            _need(node.depth == depth and node.parent is parent, f"{name}: its path breaks at block {depth}")
        for i, row in enumerate(state.lane.pages):
            mapped = state.mapped[i]
            _need(bool((row[:mapped] >= 0).all()), f"{name}: an unmapped block below {mapped}")
            _need(bool((row[mapped:] == -1).all()), f"{name}: a mapped block past {mapped}")
        if state.root is not None and not state.staged:
            keys = state.keys(store.block, store.lead)
            for b in range(min(len(state.path), state.lane.frontier // store.block)):
                _need(state.path[b].key == keys.key(b), f"{name}: block {b} of its path holds other tokens")
        if state.root is None:
            _need(not state.path and not state.pending, f"{name} is not cacheable and left something")


def _check_taps(store: Store, lanes: Iterable[LaneState]) -> None:
    count = store.counters
    dropped = sum(v for k, v in count.items() if k.startswith("taps_dropped."))
    open_taps = sum(len(s.taps) + len(s.pending) for s in lanes)
    planned, published = count.get("taps_planned", 0), count.get("taps_published", 0)
    _need(
        planned == published + dropped + open_taps,
        f"{planned} taps planned; {published} published, {dropped} dropped, {open_taps} open",
    )

"""How a lane ends (§7.7, D7): its endpoint, the write-back of its blocks, and the release of all it holds."""

from __future__ import annotations

from hpc_index.captures import drop_unpublished, publish_pending
from hpc_index.host import write_back
from hpc_index.lane_state import LaneState
from hpc_index.lanes import publish_blocks
from hpc_index.records import Ending, Finish, Plan, SnapshotKind
from hpc_index.slots import make_slot_room
from hpc_index.snapshots import Snapshot, snapshots_on
from hpc_index.store import Store

__all__ = ["finish"]


def finish(store: Store, state: LaneState, how: Finish) -> tuple[Plan, ...]:
    """End a lane in any state. What it committed stays reusable; everything else comes free.

    Destinations of copies in flight stay reserved until those land.
    """
    plans: list[Plan] = []
    ending = how.how
    frozen = False
    endpoint: Snapshot | None = None
    if not state.staged and state.root is not None:
        if not state.waits and not state.doomed:
            publish_blocks(store, state)
        plans += publish_pending(store, state)
    drop_unpublished(store, state, "restore_failed" if state.doomed else f"lane_{ending.value}")
    reason = _why_no_endpoint(store, state, ending)
    if reason is None:
        endpoint, frozen = _publish_endpoint(store, state)
    else:
        store.counters.count(f"endpoints_skipped.{reason}")
    if ending is Ending.SUSPENDED:
        store.counters.count("suspended")
    if state.root is not None and not state.staged:
        plan = write_back(store, state.path, state.path, endpoint, ())
        if plan is not None:
            plans.append(plan)
        elif endpoint is not None:
            store.settle_snapshot(endpoint)
    _release(store, state, frozen)
    store.epoch += 1
    return tuple(plans)


def _why_no_endpoint(store: Store, state: LaneState, ending: Ending) -> str | None:
    """The first condition of §7.7 that fails, or None."""
    frontier = state.lane.frontier
    if state.root is None:
        return "not_cacheable"
    if state.staged or ending is Ending.UNSTAGED:
        return "not_started"
    if ending is Ending.FAILED:
        return "failed"
    if state.doomed:
        return "restore_failed"
    if state.waits:
        return "restoring"
    if frontier % store.geometry.unit:
        return "unit"
    pools = store.geometry.pools
    if any(f < frontier - p.lag for f, p in zip(state.frontiers, pools, strict=True)):
        return "pool_behind"
    if frontier == 0:
        return "empty"
    if ending is not Ending.SUSPENDED and frontier - _deepest(store, state) < store.block:
        return "near"
    return None


def _deepest(store: Store, state: LaneState) -> int:
    """Frontier of the deepest snapshot on the lane's path; 0 for none."""
    if state.root is None:
        return 0
    keys = state.keys(store.block, store.lead)
    found = snapshots_on(state.path, state.root, keys, state.lane.frontier)
    return max((s.frontier for s in found), default=0)


def _publish_endpoint(store: Store, state: LaneState) -> tuple[Snapshot | None, bool]:
    """Freeze the lane's own slot and hand over its partial last page; no copy is made (§7.7)."""
    root = state.root
    if root is None:
        return None, False
    lane, block = state.lane, store.block
    begin = block * len(state.path)
    anchor = state.path[-1] if state.path else root
    tail = b""
    if lane.frontier > begin:
        tail = state.keys(block, store.lead, len(state.path)).between(begin, lane.frontier)
    twin = store.snapshots.at(anchor, tail)
    if twin is not None:
        twin.last_hit = store.snapshots.tick()
        store.counters.count("endpoints_skipped.duplicate")
        return twin, False
    # The lane's last tap stays retained: a next turn that re-renders the reply resumes from it (§9.3).
    source = state.source if state.source is not None and state.source.id in store.snapshots.by_id else None
    if not make_slot_room(store, (source,)):
        store.counters.count("endpoints_skipped.no_slot")
        return None, False
    store.slots.freeze()
    pages: tuple[int, ...] = ()
    if tail:
        last = len(state.path)
        pages = tuple(int(row[last]) for row in lane.pages)
        for row in lane.pages:
            row[last] = -1
    endpoint = store.snapshots.add(SnapshotKind.ENDPOINT, anchor, lane.frontier, tail, lane.slot, pages)
    if source is not None and source.id in store.snapshots.by_id and source.frontier < lane.frontier:
        store.snapshots.supersede(source)
    store.counters.count("endpoints_published")
    return endpoint, True


def _release(store: Store, state: LaneState, frozen: bool) -> None:
    """Give back the slot, private pages and pins; blocks become evictable deepest first (§9.1)."""
    lane = state.lane
    for i, pages in enumerate(store.pages):
        pages.give(state.private_pages(i))
        lane.pages[i].fill(-1)
    if not frozen:
        flight = None if state.slot_ticket is None else store.transfers.open.get(state.slot_ticket)
        if flight is None:
            store.slots.give_from_lane(lane.slot)
        else:
            flight.slot, flight.lane = lane.slot, None
    store.release(state.hold)
    for node in reversed(state.path):
        node.refs -= 1
        store.settle(node)
    if state.root is not None:
        state.root.refs -= 1
        store.tree.close_root(state.root)

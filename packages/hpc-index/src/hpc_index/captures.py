"""Taking snapshots of a running lane and publishing them (§7.1, §7.4): which are due, copied, adopted."""

from __future__ import annotations

import attrs

from hpc_index.host import write_back
from hpc_index.ids import SnapshotId, Ticket
from hpc_index.lane_state import LaneState, Pending
from hpc_index.records import Chunk, Copy, CopyKind, Plan, SnapshotKind, Stream, TapSlot, int32
from hpc_index.slots import take_slot
from hpc_index.snapshots import Snapshot
from hpc_index.store import Store
from hpc_index.taps import PlannedTap, TapSource, inside_span
from hpc_index.tree import Node

__all__ = [
    "add_tap",
    "capture",
    "drop_failed",
    "drop_unpublished",
    "due_taps",
    "fail_capture",
    "launch_captures",
    "next_chunk",
    "publish_pending",
]


def next_chunk(store: Store, state: LaneState, budget: int, taps_inside: bool) -> Chunk:
    """The next chunk: up to the budget, the prompt's end or the next exact tap (§7.1).

    With taps_inside exact taps do not end it; each takes a slot now, and one that finds none is dropped and
    counted.
    """
    begin = state.lane.frontier
    end = min(begin + budget, state.n)
    inside: list[TapSlot] = []
    for tap in list(state.taps):
        if tap.position > end or not tap.exact:
            continue
        if not taps_inside:
            end = tap.position
            break
        slot = state.reserved.get(tap.position)
        if slot is None:
            slot = take_slot(store, (state.source, state.last_tap))
            if slot is None:
                state.taps.remove(tap)
                _drop(store, "no_slot")
                continue
            state.reserved[tap.position] = slot
        inside.append(TapSlot(tap.position, slot))
    state.chunk_end, state.budget = end, budget
    return Chunk(end, tuple(inside))


def add_tap(store: Store, state: LaneState, position: int) -> bool:
    """Plan an exact Boundary tap at a later position (§12.2). False if it is too late for it."""
    if state.root is None or state.doomed or position % store.geometry.unit:
        return False
    if position <= max(state.lane.frontier, state.chunk_end) or position > state.n - 1:
        return False
    if inside_span(position, state.prompt.spans):
        return False
    for i, tap in enumerate(state.taps):
        if tap.position == position:
            state.taps[i] = attrs.evolve(tap, exact=True, boundary=True)
            break
    else:
        state.taps.append(PlannedTap(position, True, True, TapSource.EXPLICIT))
        state.taps.sort(key=lambda t: t.position)
        store.counters.count("taps_planned")
    state.event = min(state.event, position)
    return True


def due_taps(store: Store, state: LaneState, copies: list[Copy]) -> list[Pending]:
    """Capture what is due at the lane's frontier; the copies go to `copies`, the captures to `pending`.

    Exact taps are due at their position. Flexible ones at the boundary of the chunk that reaches them, or
    before the prompt's last chunk when they lie in it. One capture serves all that are due together.
    """
    frontier = state.lane.frontier
    taken: list[Pending] = []
    chosen: PlannedTap | None = None
    while state.taps and state.taps[0].position <= frontier:
        tap = state.taps.pop(0)
        slot = state.reserved.pop(tap.position, None)
        if slot is not None:
            taken += _capture_inside(store, state, tap, slot, copies)
        elif tap.exact and tap.position != frontier:
            _drop(store, "passed")
        elif chosen is None or (tap.exact and not chosen.exact):
            if chosen is not None:
                _drop(store, "merged")
            chosen = tap
        else:
            _drop(store, "merged")
    left = state.n - frontier
    if state.taps and 0 < left <= (state.budget or store.policy.prefill_chunk):
        ahead = state.taps
        if not any(tap.exact for tap in ahead):
            state.taps = []
            for tap in ahead:
                if chosen is None:
                    chosen = tap
                else:
                    _drop(store, "merged")
    if chosen is not None:
        reason = _why_not(store, state, chosen)
        if reason is None:
            kind = SnapshotKind.BOUNDARY if chosen.boundary else SnapshotKind.TAP
            captured = capture(store, state, kind, copies)
            if isinstance(captured, Pending):
                taken.append(captured)
            else:
                reason = captured
        if reason is not None:
            _drop(store, reason)
    return taken


def _why_not(store: Store, state: LaneState, tap: PlannedTap) -> str | None:
    frontier = state.lane.frontier
    if state.doomed:
        return "restore_failed"
    if tap.exact:
        return None
    if frontier >= state.n:
        return "no_boundary"
    if frontier % store.geometry.unit:
        return "unit"
    if inside_span(frontier, state.prompt.spans):
        return "span"
    # A snapshot serves every prompt that leaves after it, so another one so near is worth little (D3).
    if frontier - state.mark <= store.block:
        return "near"
    return None


def capture(store: Store, state: LaneState, kind: SnapshotKind, copies: list[Copy]) -> Pending | str:
    """Copy the lane's state and the start of its partial block at the frontier; or the reason why not.

    The columns of the partial block that each pool has committed never change again, so they are copied
    now, into pages that the cache owns (§6.3, §7.4).
    """
    position = state.lane.frontier
    if _exists(store, state, position):
        return "duplicate"
    slot = take_slot(store, (state.source, state.last_tap))
    if slot is None:
        return "no_slot"
    pages = _copy_tail(store, state, position, copies)
    if pages is None:
        store.slots.give_from_snapshot(slot)
        return "no_page"
    copies.append(Copy(CopyKind.SLOT_TO_SLOT, int32(state.lane.slot), int32(slot)))
    return _pend(state, Pending(position, slot, pages, kind, None))


def _capture_inside(
    store: Store, state: LaneState, tap: PlannedTap, slot: int, copies: list[Copy]
) -> list[Pending]:
    """Adopt a state that the program wrote into `slot` within the chunk (§7.3)."""
    reason = "restore_failed" if state.doomed else None
    pages: tuple[int, ...] | None = ()
    if reason is None and _exists(store, state, tap.position):
        reason = "duplicate"
    if reason is None and (pages := _copy_tail(store, state, tap.position, copies)) is None:
        reason = "no_page"
    if reason is not None or pages is None:
        store.slots.give_from_snapshot(slot)
        _drop(store, reason or "no_page")
        return []
    kind = SnapshotKind.BOUNDARY if tap.boundary else SnapshotKind.TAP
    return [_pend(state, Pending(tap.position, slot, pages, kind, None))]


def _pend(state: LaneState, pending: Pending) -> Pending:
    state.pending.append(pending)
    state.mark = max(state.mark, pending.position)
    return pending


def _copy_tail(store: Store, state: LaneState, position: int, copies: list[Copy]) -> tuple[int, ...] | None:
    b = position // store.block
    if not position % store.block:
        return ()
    if not store.make_room([1] * len(store.pages)):
        return None
    bundle = store.take_bundle()
    for i, pool in enumerate(store.geometry.pools):
        columns = position - pool.lag - b * store.block
        if columns > 0:
            src = int(state.lane.pages[i][b])
            copies.append(Copy(CopyKind.PAGE_TO_PAGE, int32(src), int32(bundle[i]), pool=i, columns=columns))
    return bundle


def _place(store: Store, state: LaneState, position: int) -> tuple[Node, bytes] | None:
    """Anchor and tail of a snapshot at a position whose full blocks are all in the tree."""
    blocks = position // store.block
    if state.root is None or len(state.path) < blocks:
        return None
    anchor = state.path[blocks - 1] if blocks else state.root
    begin = blocks * store.block
    if begin == position:
        return anchor, b""
    return anchor, state.keys(store.block, store.lead, blocks).between(begin, position)


def _exists(store: Store, state: LaneState, position: int) -> bool:
    """Whether a snapshot of that very prefix is published; if so it is refreshed (D5)."""
    place = _place(store, state, position)
    twin = None if place is None else store.snapshots.at(*place)
    if twin is None or not twin.valid:
        return False
    twin.last_hit = store.snapshots.tick()
    return True


def publish_pending(store: Store, state: LaneState) -> list[Plan]:
    """Publish the captures whose blocks are in the tree, and write their images to the host (§7.4)."""
    plans: list[Plan] = []
    if state.waits or state.doomed:
        return plans
    for pending in list(state.pending):
        place = _place(store, state, pending.position)
        if place is None:
            continue
        state.pending.remove(pending)
        anchor, tail = place
        twin = store.snapshots.at(anchor, tail)
        if twin is not None:
            twin.last_hit = store.snapshots.tick()
            _discard(store, pending, "duplicate")
            continue
        for older in (state.source, state.last_tap):
            if older is not None and older.id in store.snapshots.by_id and older.frontier < pending.position:
                store.snapshots.supersede(older)
        s = store.snapshots.add(pending.kind, anchor, pending.position, tail, pending.slot, pending.pages)
        store.epoch += 1
        store.counters.count("taps_published")
        if pending.kind is SnapshotKind.TAP:
            state.last_tap = s
        _track(store, pending, s.id)
        after = () if pending.ticket is None else (pending.ticket,)
        path = state.path[: anchor.depth + 1]
        plan = write_back(store, path, (), s, after)
        if plan is not None:
            plans.append(plan)
        else:
            store.settle_snapshot(s)
    return plans


def _track(store: Store, pending: Pending, snapshot: SnapshotId) -> None:
    """Should the capture's own plan still fail, the snapshot goes with it."""
    flight = None if pending.ticket is None else store.transfers.open.get(pending.ticket)
    if flight is not None:
        flight.captures.append(snapshot)


def launch_captures(store: Store, copies: list[Copy], taken: list[Pending]) -> list[Plan]:
    """One Compute plan for the copies of several captures."""
    if not copies:
        return []
    plan, _flight = store.transfers.launch(Stream.COMPUTE, copies)
    for pending in taken:
        pending.ticket = plan.ticket
    return [plan]


def drop_unpublished(store: Store, state: LaneState, reason: str) -> None:
    """Give back what planned, reserved and captured taps of an ending lane hold, and count them."""
    for _tap in state.taps:
        _drop(store, reason)
    state.taps = []
    for slot in state.reserved.values():
        store.slots.give_from_snapshot(slot)
    state.reserved = {}
    for pending in state.pending:
        _discard(store, pending, reason)
    state.pending = []


def drop_failed(store: Store, state: LaneState, ticket: Ticket) -> None:
    """Drop captures not yet published whose own copy failed."""
    for pending in [c for c in state.pending if c.ticket == ticket]:
        state.pending.remove(pending)
        _discard(store, pending, "copy_failed")


def _discard(store: Store, pending: Pending, reason: str) -> None:
    store.slots.give_from_snapshot(pending.slot)
    store.give_bundle(pending.pages)
    _drop(store, reason)


def _drop(store: Store, reason: str) -> None:
    store.counters.count(f"taps_dropped.{reason}")


def fail_capture(store: Store, snapshot: Snapshot) -> None:
    """A snapshot whose own copy failed: never matched again, and gone with the last copy that reads it."""
    snapshot.broken = True
    store.counters.count("captures_failed")
    store.epoch += 1
    store.settle_snapshot(snapshot)

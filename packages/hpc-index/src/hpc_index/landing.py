"""The end of a copy: the only place where a transfer changes residency (§10, invariant 9)."""

from __future__ import annotations

from hpc_index.captures import drop_failed, fail_capture
from hpc_index.ids import LaneId, Ticket
from hpc_index.lane_state import LaneState
from hpc_index.records import Stream
from hpc_index.store import Store
from hpc_index.transfers import Flight
from hpc_index.tree import Residency

__all__ = ["landed"]


def landed(store: Store, ticket: Ticket, ok: bool, running: dict[LaneId, LaneState]) -> tuple[LaneId, ...]:
    """Take note that a plan ended. Returns the lanes that must fail with it, in order of id."""
    flight = store.transfers.land(ticket)
    store.epoch += 1
    match flight.stream:
        case Stream.RESTORE:
            _land_restore(store, flight, ok)
        case Stream.WRITE:
            _land_write(store, flight, ok)
        case Stream.COMPUTE:
            _land_compute(store, flight, ok, running)
    lanes: list[LaneId] = []
    for state in flight.waiters:
        state.waits.discard(ticket)
        if state.slot_ticket == ticket:
            state.slot_ticket = None
        if not ok and state.lane.id in running:
            state.doomed = True
            lanes.append(state.lane.id)
    if flight.slot >= 0:
        store.slots.give_from_lane(flight.slot)
    store.release(flight.hold)
    return tuple(sorted(lanes))


def _land_restore(store: Store, flight: Flight, ok: bool) -> None:
    if not ok:
        store.counters.count("restore_failed")
    for node in flight.fills:
        # Lanes that map a broken block keep its pages until they have failed.
        node.device = Residency.RESIDENT if ok else Residency.BROKEN
        node.filling = None
    snapshot = flight.hold.snapshot
    if flight.tail and snapshot is not None:
        snapshot.filling = None
        if ok:
            snapshot.tail_device = Residency.RESIDENT
        else:
            store.drop_tail(snapshot)


def _land_write(store: Store, flight: Flight, ok: bool) -> None:
    if ok:
        store.counters.count("written_bytes", flight.nbytes)
    else:
        store.counters.count("write_failed")
    for node in flight.fills:
        if ok:
            node.host = Residency.RESIDENT
        else:
            store.slabs.give((node.slab,))
            node.slab, node.host = -1, Residency.ABSENT
    snapshot = flight.hold.snapshot
    if flight.image and snapshot is not None:
        if ok:
            snapshot.host = Residency.RESIDENT
        else:
            store.slabs.give(snapshot.slabs)
            snapshot.slabs, snapshot.host = (), Residency.ABSENT


def _land_compute(store: Store, flight: Flight, ok: bool, running: dict[LaneId, LaneState]) -> None:
    if ok:
        return
    store.counters.count("compute_failed")
    for snapshot_id in flight.captures:
        snapshot = store.snapshots.by_id.get(snapshot_id)
        if snapshot is not None:
            fail_capture(store, snapshot)
    for state in running.values():
        drop_failed(store, state, flight.ticket)

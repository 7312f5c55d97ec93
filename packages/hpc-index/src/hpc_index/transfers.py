"""Copies on their way: every plan emitted, until the program reports its end (design §2).

A flight holds what its copies read and write. While it is open nothing of that is evicted, freed or
reused (§6.5, §10 invariant 6).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from hpc_index.errors import TicketError
from hpc_index.ids import SnapshotId, Ticket
from hpc_index.records import Copy, Plan, Stream
from hpc_index.snapshots import Snapshot
from hpc_index.tree import Node

if TYPE_CHECKING:
    from hpc_index.lane_state import LaneState

__all__ = ["Flight", "Hold", "Transfers"]


@attrs.define(eq=False)
class Hold:
    """Pins on a path and on a snapshot, to be released once."""

    nodes: tuple[Node, ...] = ()
    snapshot: Snapshot | None = None


@attrs.define(eq=False)
class Flight:
    """One plan in flight.

    hold: what it pins. fills: blocks whose copy (device for a restore, host for a write) it brings.
    tail: the held snapshot's device tail is a destination. image: the held snapshot's host copy is one.
    waiters: lanes that fail if it does. captures: snapshots whose content it makes.
    slot: a lane's slot that is a destination and whose lane is gone; -1 while it has an owner.
    lane: the lane whose slot it writes. prefetch: it serves no lane yet (§6.6).
    """

    ticket: Ticket
    stream: Stream
    nbytes: int = 0
    hold: Hold = attrs.field(factory=Hold)
    fills: tuple[Node, ...] = ()
    tail: bool = False
    image: bool = False
    waiters: list[LaneState] = attrs.field(factory=list)
    captures: list[SnapshotId] = attrs.field(factory=list)
    lane: LaneState | None = None
    slot: int = -1
    prefetch: bool = False


class Transfers:
    """Open flights by ticket."""

    def __init__(self) -> None:
        self.open: dict[Ticket, Flight] = {}
        self._last = 0

    def launch(
        self, stream: Stream, copies: list[Copy], after: tuple[Ticket, ...] = ()
    ) -> tuple[Plan, Flight]:
        """A plan with the next ticket and its flight, which the caller fills in."""
        self._last += 1
        ticket = Ticket(self._last)
        flight = Flight(ticket, stream)
        self.open[ticket] = flight
        return Plan(ticket, stream, after, tuple(copies)), flight

    def land(self, ticket: Ticket) -> Flight:
        """Take the flight out. TicketError if no plan of that ticket is open."""
        flight = self.open.pop(ticket, None)
        if flight is None:
            state = "landed before" if 0 < ticket <= self._last else "never issued"
            raise TicketError(f"ticket {ticket} is not in flight: {state}")
        return flight

    @property
    def prefetching(self) -> bool:
        """Whether a prefetch is in flight."""
        return any(flight.prefetch for flight in self.open.values())

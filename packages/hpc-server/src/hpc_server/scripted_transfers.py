"""Copy plans of the scripted program on their way: as late as the seam allows, in order on each stream.

Host copies read their sources only when they land or when compute work needs them: a page or slab that the
index gives away too early is caught, since another prefix's digests are copied then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import attrs

from hpc_index import PrefixIndex
from hpc_index.ids import LaneId, Ticket
from hpc_index.records import CopyKind, Geometry, Plan, Plans, Stream
from hpc_server.scripted_memory import DigestMemory

__all__ = ["Faults", "Transfers"]


@attrs.frozen
class Faults:
    """What goes wrong with copies between host and device.

    landing_delay_s: from enqueueing to landing. fail_every: each such plan of that number fails, 0 none.
    """

    landing_delay_s: float = 0.0
    fail_every: int = 0


@attrs.define(eq=False)
class _Flight:
    plan: Plan
    due: float
    fails: bool
    executed: bool = False


class Transfers:
    """Executes plans and reports their end to the index."""

    def __init__(self, index: PrefixIndex, memory: DigestMemory, geometry: Geometry, faults: Faults) -> None:
        self._index = index
        self._memory = memory
        self._geometry = geometry
        self._faults = faults
        self._streams: dict[Stream, deque[_Flight]] = {Stream.RESTORE: deque(), Stream.WRITE: deque()}
        self._failed: set[Ticket] = set()
        self._waits: dict[LaneId, tuple[Ticket, ...]] = {}
        self._doomed: set[LaneId] = set()
        self._launched = 0
        self._counts = {"restored_bytes": 0, "written_bytes": 0, "failed_plans": 0}

    @property
    def counters(self) -> Mapping[str, int]:
        """Bytes moved and plans failed."""
        return self._counts

    def enqueue(self, plans: Plans, now: float, lane: LaneId | None = None) -> None:
        """Take plans in order; compute plans run at once. lane: whose activation they are."""
        for plan in plans:
            if plan.stream is not Stream.COMPUTE:
                self._launched += 1
                every = self._faults.fail_every
                fails = every > 0 and self._launched % every == 0
                self._streams[plan.stream].append(_Flight(plan, now + self._faults.landing_delay_s, fails))
                continue
            if lane is not None:
                self._waits[lane] = plan.after
            self._bring(plan.after)
            if self._failed.isdisjoint(plan.after):
                self._execute(plan)
            self._index.landed(plan.ticket, True, now)

    def poll(self, now: float) -> bool:
        """Land what is due, first in first out on each stream."""
        landed = False
        for flights in self._streams.values():
            while flights and flights[0].due <= now:
                flight = flights.popleft()
                self._run(flight)
                self._counts["failed_plans"] += flight.fails
                self._doomed.update(self._index.landed(flight.plan.ticket, not flight.fails, now))
                landed = True
        return landed

    def broken(self, lane: LaneId, now: float) -> bool:
        """A pass of this lane is next: bring what it waits for. True if that failed."""
        del now
        waits = self._waits.get(lane, ())
        self._bring(waits)
        return lane in self._doomed or not self._failed.isdisjoint(waits)

    def forget(self, lane: LaneId) -> None:
        """The lane ends."""
        self._waits.pop(lane, None)
        self._doomed.discard(lane)

    def _bring(self, tickets: Iterable[Ticket]) -> None:
        """Execute these plans now, and what their streams have before them."""
        wanted = set(tickets)
        for flights in self._streams.values():
            last = max((i for i, flight in enumerate(flights) if flight.plan.ticket in wanted), default=-1)
            for flight in list(flights)[: last + 1]:
                self._run(flight)

    def _run(self, flight: _Flight) -> None:
        if flight.executed:
            return
        flight.executed = True
        self._bring(flight.plan.after)
        if flight.fails:
            self._failed.add(flight.plan.ticket)
        else:
            self._execute(flight.plan)

    def _execute(self, plan: Plan) -> None:
        for copy in plan.copies:
            self._memory.copy(copy)
            if plan.stream is Stream.RESTORE:
                self._counts["restored_bytes"] += self._bytes(copy.kind, copy.pool, len(copy.src))
            elif plan.stream is Stream.WRITE:
                self._counts["written_bytes"] += self._bytes(copy.kind, copy.pool, len(copy.src))

    def _bytes(self, kind: CopyKind, pool: int, count: int) -> int:
        if kind in (CopyKind.SLOT_TO_SLABS, CopyKind.SLABS_TO_SLOT):
            return self._geometry.image_bytes
        return count * self._geometry.pools[pool].page_bytes

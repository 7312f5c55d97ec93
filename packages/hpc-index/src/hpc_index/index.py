"""The facade: the one mutator of all cache state (design §2).

Not thread safe and never waiting: one worker calls it, and no call does I/O, reads a clock or touches a
byte of what is cached. Every method that starts copies returns plans, to be enqueued in order at once and
reported with `landed` when they end.
"""

from __future__ import annotations

from types import MappingProxyType

from hpc_index import admission, captures, endings, landing, lanes
from hpc_index import prefetch as prefetching
from hpc_index.cost import CostModel
from hpc_index.errors import LaneError, PromptError, StateError
from hpc_index.ids import Int32Buffer, LaneId, Ticket
from hpc_index.keys import check_prompt, check_tokens
from hpc_index.lane_state import LaneState
from hpc_index.policy import Policy, check_geometry
from hpc_index.records import (
    Chunk,
    Copy,
    Ending,
    Finish,
    Geometry,
    Grown,
    IndexStats,
    Lane,
    Plans,
    PromptView,
    Quote,
    Readiness,
    Short,
    Skipped,
    SnapshotKind,
    Stale,
    Stream,
)
from hpc_index.store import Store

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """A hybrid prefix cache's decisions and ledgers: what is kept, where, and what a request may reuse.

    Raises GeometryError for sizes that no cache can have. `now` is seconds on the caller's clock, never
    earlier than in the call before; the plain form orders events by calls and keeps no times.
    """

    def __init__(self, geometry: Geometry, cost: CostModel, policy: Policy) -> None:
        check_geometry(geometry)
        self._cost = cost
        self._store = Store(geometry, policy)
        self._lanes: dict[LaneId, LaneState] = {}
        self._last_lane = 0

    @property
    def geometry(self) -> Geometry:
        """The sizes it was made for."""
        return self._store.geometry

    def quote(self, p: PromptView, max_new: int, now: float) -> Quote:
        """What admission would do with this prompt now (§6.1-6.3). Changes and pins nothing.

        max_new: most tokens to generate, at least 0. Raises PromptError for a prompt of wrong types.
        """
        del now
        check_prompt(p, self._store.block)
        if max_new < 0:
            raise PromptError(f"max_new is {max_new}; it must be at least 0")
        free = len(self._lanes) < self.geometry.lanes
        return admission.quote(self._store, self._cost, p, max_new, free)

    def stage(self, q: Quote, p: PromptView, now: float) -> tuple[Lane, Plans] | Stale:
        """Take what a READY quote promised: pins its path, evicts, reserves pages and slot (§6.4).

        Returns the lane, its rows mapped up to its entitlement (D7), and the Restore plan (if anything comes
        from the host); or Stale, with nothing changed, if the quote no longer holds. Restored pages are
        mapped while they fill (§6.5). Raises StateError for a quote that was not READY.
        """
        del now
        if q.readiness is not Readiness.READY:
            raise StateError(f"stage: the quote is {q.readiness.value}; only a ready one can be staged")
        check_prompt(p, self._store.block)
        if len(self._lanes) >= self.geometry.lanes:
            return Stale("every lane runs")
        lane_id = LaneId(self._last_lane + 1)
        staged = lanes.stage(self._store, self._cost, lane_id, q, p)
        if isinstance(staged, Stale):
            self._store.counters.count("stale")
            return staged
        state, plans = staged
        self._last_lane += 1
        self._lanes[lane_id] = state
        return state.lane, tuple(plans)

    def activate(self, lane: LaneId, now: float) -> Plans:
        """The copies that build a staged lane's state and private pages, after the restores they read.

        One Compute plan: the image zeroed or copied, the partial last block of each pool copied. Its `after`
        names every restore that the lane's content waits for, other lanes' included.
        """
        del now
        state = self._lane(lane)
        if not state.staged:
            raise StateError(f"activate: lane {lane} was activated before")
        return tuple(lanes.activate(self._store, state))

    def next_chunk(self, lane: LaneId, budget: int, taps_inside: bool, now: float) -> Chunk:
        """Where the next prefill chunk ends: the nearest of frontier + budget, the prompt's end, the next
        exact tap. With taps_inside exact taps are captured within the chunk instead (§7.3).

        Asking again before the commit is allowed and gives the same slots again. Raises StateError once the
        prompt is prefilled, PromptError for a budget below 1.
        """
        del now
        state = self._active(lane, "next_chunk")
        if budget < 1:
            raise PromptError(f"next_chunk: budget is {budget}; it must be at least 1")
        if state.lane.frontier >= state.n:
            raise StateError(f"next_chunk: the prompt of lane {lane} ({state.n} tokens) is prefilled")
        return captures.next_chunk(self._store, state, budget, taps_inside)

    def grow(self, lane: LaneId, tokens: int, now: float) -> Grown | Short:
        """Map every position below frontier + tokens in each pool, evicting cache only (§9.5).

        All or nothing. Short.missing counts the worst pool; landing of them come free once copies land.
        """
        del now
        state = self._active(lane, "grow")
        if tokens < 0:
            raise PromptError(f"grow: tokens is {tokens}; it must be at least 0")
        return lanes.grow(self._store, state, tokens)

    def commit(self, lane: LaneId, new: Int32Buffer, frontiers: tuple[int, ...], now: float) -> Plans:
        """Tokens at [frontier, frontier + len(new)) became part of the sequence; moves the frontier.

        new: int32; where they lie in the prompt they must be the prompt's. frontiers: what each pool has
        committed, normally the new frontier less the pool's lag (not below 0). Publishes the blocks that all
        pools have (§7.6) and captures due taps: a Compute plan that copies state and partial page, then a
        Write plan a published snapshot (§7.4). Nothing of a lane whose restore is in flight is published
        before that lands. Raises PromptError for tokens or frontiers that cannot be.
        """
        del now
        state = self._active(lane, "commit")
        check_tokens("commit: new", new)
        return lanes.commit(self._store, state, new, frontiers)

    def tap(self, lane: LaneId, kind: SnapshotKind, now: float) -> Plans | Skipped:
        """Snapshot a lane at its exact frontier, inside generated text (§12.3)."""
        del now
        state = self._active(lane, "tap")
        if kind is not SnapshotKind.OUTPUT_BOUNDARY:
            raise StateError(f"tap: kind is {kind.value}; only output boundaries are taken on request")
        store = self._store
        store.counters.count("taps_planned")
        reason = self._why_no_tap(state)
        if reason is None:
            copies: list[Copy] = []
            taken = captures.capture(store, state, kind, copies)
            if isinstance(taken, str):
                reason = taken
            else:
                plans = captures.launch_captures(store, copies, [taken])
                plans += captures.publish_pending(store, state)
                state.event = lanes.next_event(store, state)
                return tuple(plans)
        store.counters.count(f"taps_dropped.{reason}")
        return Skipped(reason)

    def add_tap(self, lane: LaneId, position: int, now: float) -> bool:
        """Plan an exact tap at a later prompt position, published as a Boundary (§12.2).

        False if the lane is past it, has been given a chunk that reaches it, or nothing may be kept there.
        """
        del now
        return captures.add_tap(self._store, self._active(lane, "add_tap"), position)

    def finish(self, lane: LaneId, how: Finish, now: float) -> Plans:
        """End a lane in any state (§7.7). Returns Write plans; its id is unknown afterwards.

        Done and Cancelled leave an endpoint at the exact frontier if it lies a block or more past the deepest
        snapshot of its path; Suspended wherever it is; Failed and Unstaged none. The lane's slot becomes the
        endpoint's and its partial page the tail, without a copy.
        """
        del now
        state = self._lane(lane)
        if how.how is Ending.UNSTAGED and not state.staged:
            raise StateError(f"finish: lane {lane} was activated; it cannot end unstaged")
        plans = endings.finish(self._store, state, how)
        del self._lanes[lane]
        return plans

    def landed(self, t: Ticket, ok: bool, now: float) -> tuple[LaneId, ...]:
        """A plan ended, well or not. Returns the lanes that must be finished as Failed.

        A failed write gives its slabs back; a failed restore drops what it was filling. Raises TicketError
        for a ticket that is not in flight.
        """
        del now
        return landing.landed(self._store, t, ok, self._lanes)

    def prefetch(self, p: PromptView, now: float) -> Plans | None:
        """Bring host blocks of a waiting prompt into spare device pages (§6.6); None if none can.

        Not while a lane is staged or another prefetch is in flight. Never drops a last copy.
        """
        del now
        check_prompt(p, self._store.block)
        if any(state.staged for state in self._lanes.values()):
            return None
        return prefetching.prefetch(self._store, self._cost, p)

    def stats(self) -> IndexStats:
        """Gauges and counters at this moment."""
        store = self._store
        restoring = [f for f in store.transfers.open.values() if f.stream is Stream.RESTORE]
        filling = sum(len(f.fills) + f.tail for f in restoring)
        free = tuple(len(pages) for pages in store.pages)
        active = tuple(self._active_pages(i) for i in range(len(store.pages)))
        cached = tuple(p.size - f - a - filling for p, f, a in zip(store.pages, free, active, strict=True))
        return IndexStats(
            blocks=store.tree.blocks,
            snapshots=len(store.snapshots),
            lanes=len(self._lanes),
            pages_free=free,
            pages_active=active,
            pages_cached=cached,
            pages_filling=(filling,) * len(store.pages),
            slots_free=store.slots.free,
            slots_active=store.slots.size - store.slots.free - store.slots.held,
            slots_snapshot=store.slots.held,
            slabs_free=len(store.slabs),
            slabs_used=store.slabs.size - len(store.slabs),
            tickets_open=len(store.transfers.open),
            counters=MappingProxyType(dict(store.counters)),
        )

    def _lane(self, lane: LaneId) -> LaneState:
        state = self._lanes.get(lane)
        if state is None:
            ended = "ended" if 0 < lane <= self._last_lane else "was never staged"
            raise LaneError(f"lane {lane} {ended}")
        return state

    def _active(self, lane: LaneId, call: str) -> LaneState:
        state = self._lane(lane)
        if state.staged:
            raise StateError(f"{call}: lane {lane} is staged, not activated")
        return state

    def _active_pages(self, pool: int) -> int:
        """Pages that lanes own: private ones, and those of captures not yet published."""
        states = self._lanes.values()
        private = sum(len(s.private_pages(pool)) for s in states)
        return private + sum(1 for s in states for c in s.pending if c.pages)

    def _why_no_tap(self, state: LaneState) -> str | None:
        store = self._store
        frontier = state.lane.frontier
        if state.root is None:
            return "not_cacheable"
        if state.doomed:
            return "restore_failed"
        if not frontier or frontier % store.geometry.unit:
            return "unit"
        pools = store.geometry.pools
        if any(f < frontier - p.lag for f, p in zip(state.frontiers, pools, strict=True)):
            return "pool_behind"
        return None

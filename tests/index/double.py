"""An engine without a model: it executes the index's plans on digests, so that any wrong reuse fails.

Every column of a page holds the digest of the token prefix that a real column would have been computed
from (its token included, and the next one where the pool lags), every slot the digest of its prefix. A
forward step first checks all that a real one would read. Destinations are spoiled when a plan is submitted
and filled as late as allowed, so that whatever is read, freed or reused too early shows.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from hpc_index import PrefixIndex
from hpc_index.ids import Int32Array, LaneId, Ticket
from hpc_index.records import (
    Copy,
    CopyKind,
    Ending,
    Finish,
    Grown,
    Lane,
    Plan,
    Plans,
    PromptView,
    Quote,
    Readiness,
    Short,
    Skipped,
    SnapshotKind,
    Stale,
    Stream,
    TurnEnd,
)

__all__ = ["Engine", "Run", "WrongReuseError", "tokens_of"]

SPOILED = -1


class WrongReuseError(Exception):
    """A forward step read something other than the prefix it continues."""


def tokens_of(values: Iterable[int]) -> Int32Array:
    """An int32 token array."""
    return np.array(list(values), dtype=np.int32)


@attrs.define(eq=False)
class Run:
    """One lane as the engine sees it. prefixes[i]: digest of its first i tokens.

    waits: restores that its content comes from. garbage: one of them failed, which it does not know yet.
    """

    prompt: PromptView
    lane: Lane
    tokens: list[int]
    prefixes: list[int]
    max_new: int
    active: bool = False
    failed: bool = False
    garbage: bool = False
    waits: set[Ticket] = attrs.field(factory=set)

    @property
    def prefilled(self) -> bool:
        return self.lane.frontier >= len(self.prompt.tokens)


@attrs.define(eq=False)
class _Open:
    plan: Plan
    done: bool = False
    ok: bool = True


class Engine:
    """Pages, slots and slabs as digests, and the calls a program makes to the index."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        g = index.geometry
        self.block = g.block
        self.pages = [[[SPOILED] * g.block for _ in range(p.pages)] for p in g.pools]
        self.slots = [SPOILED] * g.slots
        self.slabs: list[dict[int, list[int]]] = [{} for _ in range(g.slabs)]
        self.open: dict[Ticket, _Open] = {}
        self.runs: dict[LaneId, Run] = {}
        self.queue: list[Plan] = []

    # Plans

    def submit(self, plans: Plans) -> None:
        """Enqueue plans. Compute lands at once and runs before the next forward step; transfers wait."""
        for plan in plans:
            if plan.stream is Stream.COMPUTE:
                self.queue.append(plan)
                self.index.landed(plan.ticket, True, 0.0)
                continue
            self.open[plan.ticket] = _Open(plan)
            if not self.queue:
                # Nothing queued still reads what was at the destinations.
                for copy in plan.copies:
                    self._spoil(copy)

    def land(self, ticket: Ticket, ok: bool = True) -> tuple[LaneId, ...]:
        """Report the end of a plan, carrying it out first if nothing has needed it yet."""
        entry = self.open[ticket]
        if entry.done or not entry.ok:
            ok = entry.ok
        elif ok:
            self._execute(ticket)
        del self.open[ticket]
        failed = self.index.landed(ticket, ok, 0.0)
        for lane in failed:
            self.runs[lane].failed = True
        for run in self.runs.values():
            run.waits.discard(ticket)
        return failed

    def doom(self, ticket: Ticket) -> None:
        """Let a restore that nothing needed yet fail. Lanes compute garbage from it until it lands."""
        entry = self.open[ticket]
        if entry.plan.stream is Stream.RESTORE and not entry.done:
            entry.ok = False

    def next_tickets(self) -> list[Ticket]:
        """The oldest open plan of each stream: streams end their plans in order."""
        first: dict[Stream, Ticket] = {}
        for ticket, entry in self.open.items():
            first.setdefault(entry.plan.stream, ticket)
        return list(first.values())

    def land_all(self) -> None:
        """Let every open plan end well."""
        while self.open:
            self.land(next(iter(self.open)))

    def _execute(self, ticket: Ticket) -> None:
        entry = self.open.get(ticket)
        if entry is None or entry.done:
            return
        # Transfers come after the compute work queued before them (§11.1).
        while self.queue and self.queue[0].ticket < ticket:
            self._compute(self.queue.pop(0))
        entry.done = True
        for copy in entry.plan.copies:
            if entry.ok:
                self._copy(copy)
            else:
                self._spoil(copy)

    def _compute(self, plan: Plan) -> None:
        for ticket in plan.after:
            self._execute(ticket)
        for copy in plan.copies:
            self._spoil(copy)
            self._copy(copy)

    def flush(self) -> None:
        """Carry out the queued compute work, with the restores it waits for."""
        while self.queue:
            self._compute(self.queue.pop(0))

    def _spoil(self, copy: Copy) -> None:
        for dst in copy.dst.tolist():
            match copy.kind:
                case CopyKind.SLAB_TO_PAGE | CopyKind.PAGE_TO_PAGE:
                    self.pages[copy.pool][dst] = [SPOILED] * self.block
                case CopyKind.PAGE_TO_SLAB:
                    self.slabs[dst].pop(copy.pool, None)
                case CopyKind.SLOT_TO_SLABS:
                    self.slabs[dst] = {}
                case _:
                    self.slots[dst] = SPOILED

    def _copy(self, copy: Copy) -> None:
        src, dst = copy.src.tolist(), copy.dst.tolist()
        pages = self.pages[copy.pool]
        match copy.kind:
            case CopyKind.PAGE_TO_SLAB:
                for s, d in zip(src, dst, strict=True):
                    self.slabs[d].pop(SPOILED, None)
                    self.slabs[d][copy.pool] = list(pages[s])
            case CopyKind.SLAB_TO_PAGE:
                for s, d in zip(src, dst, strict=True):
                    pages[d] = list(self.slabs[s].get(copy.pool, [SPOILED] * self.block))
            case CopyKind.PAGE_TO_PAGE:
                for s, d in zip(src, dst, strict=True):
                    pages[d][: copy.columns] = pages[s][: copy.columns]
            case CopyKind.SLOT_TO_SLABS:
                if len(dst) != self.index.geometry.image_slabs:
                    raise WrongReuseError(f"an image went to {len(dst)} slabs")
                for i, d in enumerate(dst):
                    self.slabs[d] = {SPOILED: [self.slots[src[0]], i]}
            case CopyKind.SLABS_TO_SLOT:
                pieces = [self.slabs[s].get(SPOILED, [SPOILED, i]) for i, s in enumerate(src)]
                whole = [p[1] for p in pieces] == list(range(self.index.geometry.image_slabs))
                same = {p[0] for p in pieces}
                self.slots[dst[0]] = same.pop() if whole and len(same) == 1 else SPOILED
            case CopyKind.SLOT_TO_SLOT:
                self.slots[dst[0]] = self.slots[src[0]]
            case CopyKind.ZERO_SLOT:
                self.slots[dst[0]] = 0

    # Lanes

    def stage(self, prompt: PromptView, max_new: int, quote: Quote | None = None) -> Run | Quote | Stale:
        """Quote and stage; the quote if it is not ready."""
        q = quote or self.index.quote(prompt, max_new, 0.0)
        if q.readiness is not Readiness.READY:
            return q
        staged = self.index.stage(q, prompt, 0.0)
        if isinstance(staged, Stale):
            return staged
        lane, plans = staged
        tokens = prompt.tokens.tolist()
        run = Run(prompt, lane, tokens, [hash((0, prompt.cache_salt))], max_new)
        self._digest(run)
        self.runs[lane.id] = run
        run.waits.update(p.ticket for p in plans)
        self.submit(plans)
        return run

    def start(self, prompt: PromptView, max_new: int) -> Run:
        """Stage and activate a request that can start."""
        run = self.stage(prompt, max_new)
        if not isinstance(run, Run):
            raise WrongReuseError(f"not started: {run}")
        self.activate(run)
        return run

    def activate(self, run: Run) -> None:
        """Build the lane; its first step checks all it resumes from."""
        plans = self.index.activate(run.lane.id, 0.0)
        run.active = True
        run.waits.update(t for p in plans for t in p.after)
        self.submit(plans)

    def prefill(self, run: Run, budget: int, taps_inside: bool = False) -> None:
        """One chunk of the prompt."""
        chunk = self.index.next_chunk(run.lane.id, budget, taps_inside, 0.0)
        self.flush()
        self._notice(run)
        for tap in chunk.taps:
            if not run.lane.frontier < tap.position <= chunk.end:
                raise WrongReuseError(f"tap {tap.position} outside the chunk")
            self.slots[tap.slot] = SPOILED if run.garbage else run.prefixes[tap.position]
        self._forward(run, chunk.end)

    def decode(self, run: Run, token: int) -> Grown | Short:
        """One generated token becomes part of the sequence, if there is a page for it."""
        grown = self.index.grow(run.lane.id, 1, 0.0)
        if isinstance(grown, Grown):
            run.tokens.append(token)
            self._digest(run)
            self._forward(run, run.lane.frontier + 1)
        return grown

    def tap(self, run: Run) -> Plans | Skipped:
        """Snapshot at the frontier."""
        plans = self.index.tap(run.lane.id, SnapshotKind.OUTPUT_BOUNDARY, 0.0)
        if not isinstance(plans, Skipped):
            self.submit(plans)
        return plans

    def finish(self, run: Run, how: Ending = Ending.DONE) -> None:
        """End a lane."""
        turn = TurnEnd.FINAL if how is Ending.DONE else None
        self.submit(self.index.finish(run.lane.id, Finish(how, turn), 0.0))
        del self.runs[run.lane.id]

    def complete(self, prompt: PromptView, reply: Iterable[int], budget: int = 64) -> tuple[Run, int]:
        """A whole request, with every copy landing at once; the run and the tokens it reused."""
        run = self.start(prompt, 64)
        reused = run.lane.frontier
        self.land_all()
        while not run.prefilled:
            self.prefill(run, budget)
            self.land_all()
        for token in reply:
            if not isinstance(self.decode(run, token), Grown):
                raise WrongReuseError("no page to grow into")
        self.finish(run)
        self.land_all()
        return run, reused

    def check(self, run: Run) -> None:
        """Everything the next forward step reads holds the lane's own prefix."""
        lane = run.lane
        state = run.prefixes[lane.frontier] if lane.frontier else 0
        if self.slots[lane.slot] != state:
            raise WrongReuseError(f"lane {lane.id}: the state is not that after {lane.frontier} tokens")
        for i, pool in enumerate(self.index.geometry.pools):
            for position in range(lane.frontier - pool.lag):
                page = int(lane.pages[i][position // self.block])
                found = self.pages[i][page][position % self.block]
                if found != run.prefixes[position + 1 + pool.lag]:
                    raise WrongReuseError(f"lane {lane.id}: column {position} of pool {pool.name}")

    def _forward(self, run: Run, end: int) -> None:
        self.flush()
        self._notice(run)
        if not run.garbage:
            self.check(run)
        lane = run.lane
        begin = lane.frontier
        for i, pool in enumerate(self.index.geometry.pools):
            own = set(self.index._lanes[lane.id].private_pages(i))
            for position in range(max(0, begin - pool.lag), end - pool.lag):
                page = int(lane.pages[i][position // self.block])
                if page < 0:
                    raise WrongReuseError(f"lane {lane.id}: position {position} is not mapped")
                if page not in own:
                    raise WrongReuseError(f"lane {lane.id} writes page {page}, which is the cache's")
                self.pages[i][page][position % self.block] = (
                    SPOILED if run.garbage else run.prefixes[position + 1 + pool.lag]
                )
        self.slots[lane.slot] = SPOILED if run.garbage else run.prefixes[end]
        frontiers = tuple(max(0, end - p.lag) for p in self.index.geometry.pools)
        new = tokens_of(run.tokens[begin:end])
        self.submit(self.index.commit(lane.id, new, frontiers, 0.0))

    def _notice(self, run: Run) -> None:
        run.garbage = run.garbage or any(not self.open[t].ok for t in run.waits if t in self.open)

    def _digest(self, run: Run) -> None:
        extras = run.prompt.extras
        for i in range(len(run.prefixes) - 1, len(run.tokens)):
            key = 0 if extras is None else int(extras[min(i // self.block, len(extras) - 1)])
            run.prefixes.append(hash((run.prefixes[i], run.tokens[i], key)))

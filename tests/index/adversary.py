"""Every operation of an index, driven by a source of choices: Hypothesis, or a seeded generator.

`choose(k)` returns one of 0..k - 1. Small choices are the ordinary ones, so that shrinking ends in plain
histories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import numpy as np

from hpc_index import CostModel, Policy, PrefixIndex, check_invariants
from hpc_index.records import (
    Ending,
    HintKind,
    PromptView,
    Quote,
    Readiness,
    Short,
    Span,
    TapHint,
)
from tests.index.double import Engine, Run, tokens_of
from tests.index.strategies import geometry

__all__ = ["STEPS", "Adversary", "Choose"]

T = TypeVar("T")
Choose = Callable[[int], int]

HINTS = list(HintKind)


@attrs.define(eq=False)
class Known:
    """A sequence that some request computed a prefix of, and its namespace and media keys."""

    tokens: list[int]
    salt: bytes
    extras: np.ndarray[tuple[int], np.dtype[np.uint64]] | None


class Adversary:
    """Lanes of a tiny engine, and what is known of earlier requests."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        block = self.pick([4, 1, 4, 4, 64])
        lags = self.pick([(0,), (0, 1), (0,), (0, 1), (1,), (0, 0)])
        pages = 6 + choose(24)
        g = geometry(
            block=block,
            pages=pages,
            lags=lags,
            lanes=1 + choose(4),
            snapshots=self.pick([3, 2, 4, 1, 6, 0]),
            slabs=self.pick([24, 60, 60, 8, 0, 3]),
            image_slabs=2,
            unit=self.pick([1, 1, 1, block]),
        )
        rules = Policy(
            taps_per_request=self.pick([4, 2, 8, 0]),
            tap_ladder_tokens=2 * block,
            tap_min_gap_tokens=block,
            prefill_chunk=2 * block,
            window_tokens=block,
            cushion_tokens=self.pick([0, 1, block]),
            junction_tokens=block,
            prefetch_blocks=3,
        )
        rate = self.pick([1e9, 2e6, 2e5])
        self.engine = Engine(PrefixIndex(g, CostModel(token_seconds=1e-3, host_bytes_per_second=rate), rules))
        self.block = block
        self.room = min(pages * block, 10 * block)
        self.known: list[Known] = []
        self.kept: tuple[Quote, PromptView] | None = None

    def pick(self, items: Sequence[T]) -> T:
        return items[self.choose(len(items))]

    def prompt(self) -> tuple[PromptView, Known]:
        """A new prompt: mostly an old sequence, cut somewhere, with a few tokens of a tiny alphabet."""
        new = [self.choose(2) for _ in range(self.choose(5))]
        step = self.pick([1, max(1, self.block // 2), self.block])
        added = [t for t in new for _ in range(step)]
        tokens: list[int] = []
        salt, extras = b"", None
        if self.known and self.choose(6) < 5:
            old = self.pick(self.known)
            salt, extras = old.salt, old.extras
            whole = len(old.tokens)
            cuts = [whole, whole - whole % self.block, self.choose(whole + 1), (whole // 2) + 1]
            tokens = old.tokens[: self.pick(cuts)]
        elif self.choose(4) == 3:
            salt = b"other"
        tokens = (tokens + added or [0])[: self.room]
        n = len(tokens)
        grid = self.pick([1, self.block])
        hints = tuple(
            TapHint(self.choose(n + 1) // grid * grid, self.pick(HINTS)) for _ in range(self.choose(4))
        )
        spans: tuple[Span, ...] = ()
        if extras is None and n > 2 and self.choose(8) == 7:
            begin = self.choose(n - 1)
            spans = (Span(begin, begin + 1 + self.choose(n - begin)),)
            extras = np.zeros(-(-n // self.block), np.uint64)
            extras[begin // self.block :] = 1 + self.choose(2)
        elif extras is not None:
            last = extras[-1]
            extras = np.concatenate([extras, np.full(n // self.block + 1, last, np.uint64)])
            extras = extras[: -(-n // self.block)].copy()
        view = PromptView(tokens_of(tokens), extras, salt, hints, spans, self.choose(10) < 9)
        return view, Known(tokens, salt, extras)

    def staged(self) -> list[Run]:
        return [r for r in self.engine.runs.values() if not r.active]

    def running(self, prefilled: bool) -> list[Run]:
        runs = self.engine.runs.values()
        return [r for r in runs if r.active and not r.failed and r.prefilled is prefilled]

    # Operations; each does nothing where it cannot apply.

    def stage(self) -> None:
        view, _ = self.prompt()
        staged = self.engine.stage(view, self.choose(6))
        if isinstance(staged, Run):
            assert staged.lane.frontier <= len(view.tokens) - 1
            return
        assert isinstance(staged, Quote), "a fresh quote is never stale"
        assert staged.blocked_by is not None
        if not self.engine.runs and not self.engine.open:
            assert staged.readiness is Readiness.PERMANENTLY_INFEASIBLE

    def start(self) -> None:
        self.stage()
        for run in self.staged():
            if not run.failed:
                self.engine.activate(run)

    def serve(self) -> None:
        """One request from start to end, on top of whatever else runs."""
        before = set(self.engine.runs)
        self.start()
        for lane in set(self.engine.runs) - before:
            run = self.engine.runs[lane]
            while not run.prefilled and not run.failed:
                self.engine.prefill(run, self.pick([2, 1]) * self.block, bool(self.choose(2)))
            for _ in range(self.choose(self.block + 2)):
                if run.failed or isinstance(self.engine.decode(run, self.choose(2)), Short):
                    break
            self._remember(run)
            self.engine.finish(run, self.pick([Ending.DONE, Ending.DONE, Ending.SUSPENDED]))

    def flood(self) -> None:
        """A request that leaves nothing and pushes what is cached off the device."""
        pages = min(p.pages for p in self.engine.index.geometry.pools)
        tokens = [2] * (self.block * (pages - self.choose(3)) - 1)
        view = PromptView(tokens_of(tokens), cacheable=False)
        run = self.engine.stage(view, 1)
        if isinstance(run, Run):
            self.engine.finish(run, Ending.UNSTAGED)

    def keep_quote(self) -> None:
        view, _ = self.prompt()
        self.kept = (self.engine.index.quote(view, 2, 0.0), view)

    def stage_kept(self) -> None:
        if self.kept is not None:
            quote, view = self.kept
            self.kept = None
            self.engine.stage(view, 2, quote)

    def activate(self) -> None:
        runs = self.staged()
        if runs:
            run = self.pick(runs)
            if run.failed:
                self.engine.finish(run, Ending.FAILED)
            else:
                self.engine.activate(run)

    def prefill(self) -> None:
        runs = self.running(prefilled=False)
        if runs:
            budget = self.pick([2, 1, 3]) * self.block - self.choose(2)
            self.engine.prefill(self.pick(runs), max(1, budget), bool(self.choose(2)))

    def prefill_all(self) -> None:
        for run in self.running(prefilled=False):
            while not run.prefilled:
                self.engine.prefill(run, 2 * self.block)

    def decode(self) -> None:
        runs = self.running(prefilled=True)
        if runs:
            run = self.pick(runs)
            for _ in range(1 + self.choose(2 * self.block + 1)):
                grown = self.engine.decode(run, self.choose(2))
                if isinstance(grown, Short):
                    assert grown.missing > 0
                    break

    def tap(self) -> None:
        runs = self.running(prefilled=True)
        if runs:
            self.engine.tap(self.pick(runs))

    def add_tap(self) -> None:
        runs = self.running(prefilled=False)
        if runs:
            run = self.pick(runs)
            self.engine.index.add_tap(run.lane.id, run.lane.frontier + self.choose(9), 0.0)

    def finish(self) -> None:
        runs = list(self.engine.runs.values())
        if runs:
            run = self.pick(runs)
            how = self.pick([Ending.DONE, Ending.DONE, Ending.CANCELLED, Ending.FAILED])
            if not run.active:
                how = self.pick([Ending.UNSTAGED, Ending.CANCELLED])
            self._remember(run)
            self.engine.finish(run, how)

    def suspend_and_resume(self) -> None:
        runs = self.running(prefilled=True) + self.running(prefilled=False)
        if not runs:
            return
        run = self.pick(runs)
        frontier = run.lane.frontier
        tokens = [*run.tokens[:frontier], 1]
        self._remember(run)
        self.engine.finish(run, Ending.SUSPENDED)
        if len(tokens) < self.room and run.prompt.extras is None and not self.choose(2):
            view = PromptView(tokens_of(tokens), None, run.prompt.cache_salt)
            resumed = self.engine.stage(view, 1)
            if isinstance(resumed, Run):
                self.engine.activate(resumed)

    def land(self) -> None:
        tickets = self.engine.next_tickets()
        if tickets:
            self.engine.land(self.pick(tickets), ok=self.choose(7) < 6)

    def doom(self) -> None:
        tickets = self.engine.next_tickets()
        if tickets:
            self.engine.doom(self.pick(tickets))

    def land_all(self) -> None:
        self.engine.land_all()

    def prefetch(self) -> None:
        view, _ = self.prompt()
        plans = self.engine.index.prefetch(view, 0.0)
        if plans is not None:
            self.engine.submit(plans)

    def _remember(self, run: Run) -> None:
        tokens = run.tokens[: run.lane.frontier + 1]
        if tokens and run.prompt.cacheable:
            self.known.append(Known(tokens, run.prompt.cache_salt, run.prompt.extras))
            self.known = self.known[-12:]

    def close(self) -> None:
        """End everything; every page, slot and slab must then be free or the cache's."""
        for run in list(self.engine.runs.values()):
            self.engine.finish(run, Ending.CANCELLED)
        self.engine.land_all()
        check_invariants(self.engine.index)
        stats = self.engine.index.stats()
        assert stats.lanes == stats.slots_active == stats.tickets_open == 0
        assert set(stats.pages_active) == set(stats.pages_filling) == {0}


STEPS: tuple[tuple[str, int], ...] = (
    ("serve", 10),
    ("start", 5),
    ("stage", 3),
    ("activate", 2),
    ("prefill", 5),
    ("prefill_all", 2),
    ("decode", 5),
    ("finish", 4),
    ("land", 5),
    ("land_all", 2),
    ("doom", 2),
    ("flood", 3),
    ("suspend_and_resume", 1),
    ("tap", 1),
    ("add_tap", 2),
    ("prefetch", 3),
    ("keep_quote", 1),
    ("stage_kept", 1),
)
"""Operations and how often a driver should take them."""

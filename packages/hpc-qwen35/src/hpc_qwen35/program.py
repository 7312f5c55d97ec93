"""A Qwen3.5 model with its cache: fits the server's Program protocol by shape (design §2).

The index decides, this program executes: copies of its plans, forward passes between them, and one sampler
a lane. Copies run to their end where they are issued, so every plan has landed when a method returns.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager

import attrs
import numpy as np
import torch

from hpc_index import PrefixIndex
from hpc_index.ids import Int32Buffer, LaneId, Ticket
from hpc_index.records import (
    Ending,
    Finish,
    IndexStats,
    Plan,
    Plans,
    PromptView,
    Quote,
    Short,
    Skipped,
    SnapshotKind,
    Stale,
)
from hpc_index.requests import Outcome, PrefillStep, Request, StepOut, Suspended, TokenLogprobs
from hpc_qwen35.copies import CopyEngine
from hpc_qwen35.lane import Sequence
from hpc_qwen35.model import Qwen35Model
from hpc_qwen35.options import Resolved
from hpc_qwen35.sampling import Unsampled, choose

__all__ = ["ProgramStats", "Qwen35Program"]

_log = logging.getLogger(__name__)

_NOTHING = StepOut(tokens=np.empty(0, dtype=np.int32), logprobs=(), outcome=Outcome.TOKENS)


@attrs.frozen
class ProgramStats:
    """The index's gauges and counters, and the program's own monotonic ones."""

    index: IndexStats
    counters: Mapping[str, int]


class Qwen35Program:
    """The engine worker is its only caller; nothing here is safe to share between threads.

    model: weights with the KV pool and state slots that `copies` moves bytes of. index: its ledgers, of the
    same geometry. resolved: the effective options. addressable: token ids are [0, addressable).
    """

    def __init__(
        self,
        model: Qwen35Model,
        copies: CopyEngine,
        index: PrefixIndex,
        resolved: Resolved,
        *,
        addressable: int,
    ) -> None:
        self.resolved = resolved
        self._model = model
        self._copies = copies
        self._index = index
        self._addressable = addressable
        self._lanes: dict[LaneId, Sequence] = {}
        self._counters: Counter[str] = Counter()
        self._landed = False
        self._broken: set[Ticket] = set()

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence, prompt and reply together."""
        return self.resolved.max_context

    @property
    def vocab_size(self) -> int:
        """Addressable token ids are [0, vocab_size); the padding rows above are never chosen."""
        return self._addressable

    @property
    def index(self) -> PrefixIndex:
        """The cache's index, to look at; only the program changes it."""
        return self._index

    @property
    def model(self) -> Qwen35Model:
        """The model, to measure with; a running program's lanes own its slots and pages."""
        return self._model

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that lives between two calls, by name: weights, KV pages, state slots, host slabs."""
        return {
            **self._model.tensors(),
            "kv": self._copies.pools[0].bytes,
            "states": self._copies.images.bytes,
            "slabs": self._copies.slabs,
        }

    # Admission

    def _view(self, r: Request) -> PromptView:
        return r.prompt if self.resolved.prefix_reuse else attrs.evolve(r.prompt, cacheable=False)

    def quote(self, r: Request, now: float) -> Quote:
        """What admission would do now (§6.1-6.3). Changes and pins nothing."""
        return self._index.quote(self._view(r), r.max_new, now)

    def admit(self, q: Quote, r: Request, now: float, resume: Suspended | None) -> LaneId | Stale:
        """Stage and activate: the lane has its pages and its state when this returns (§6.4).

        Raises:
            ValueError: a sampling option out of range; nothing was staged.
        """
        sequence = Sequence.start(r, self._addressable, resume)
        staged = self._index.stage(q, self._view(r), now)
        if isinstance(staged, Stale):
            return staged
        lane, plans = staged
        sequence.attach(lane)
        self._lanes[lane.id] = sequence
        self._run(plans, now)
        self._run(self._index.activate(lane.id, now), now)
        self._counters["admitted"] += 1
        self._counters["reused_tokens"] += lane.frontier
        return lane.id

    def prefetch(self, r: Request, now: float) -> int:
        """Copy host blocks of a waiting request into spare pages; bytes copied (§6.6)."""
        plans = self._index.prefetch(self._view(r), now)
        return self._run(plans, now) if plans else 0

    def poll(self, now: float) -> bool:
        """True if a copy landed since the last call. Copies run where they are issued, so none is pending."""
        landed, self._landed = self._landed, False
        return landed

    # Computing

    @torch.inference_mode()
    def prefill(self, lane: LaneId, budget: int, now: float) -> PrefillStep:
        """One chunk of at most `budget` prompt tokens; the last one also chooses the first token.

        A pass that runs out of memory fails its lane.
        """
        torch.set_num_threads(self.resolved.prefill_threads)
        s = self._lanes[lane]
        begin = s.lane.frontier
        if s.failed or not s.prefilling:
            return PrefillStep(frontier=begin, done=not s.failed, first=None, failed=s.failed)
        chunk = self._index.next_chunk(lane, min(budget, s.prefill_end - begin), False, now)
        grown = self._index.grow(lane, chunk.end - begin, now)
        if isinstance(grown, Short):
            landing = grown.landing >= grown.missing
            return PrefillStep(frontier=begin, done=False, first=None, short=True, landing=landing)
        return self._prefill_to(s, chunk.end, now)

    def _prefill_to(self, s: Sequence, end: int, now: float) -> PrefillStep:
        begin, done = s.lane.frontier, end == s.prefill_end
        first: StepOut | None = None
        with self._pass([s]):
            hidden = self._forward(s, s.part(begin, end), now)
            self._tap_boundary(s, now)
            self._counters["prefill_tokens"] += end - begin
            self._counters["prefill_chunks"] += 1
            if done and not s.waiting:  # what a resumed lane chose before it was set aside still waits
                first = self._choose(self._model.logits(hidden[None]), [s])[0]
        failed = s.failed and first is None
        return PrefillStep(frontier=s.lane.frontier, done=done and not failed, first=first, failed=failed)

    @torch.inference_mode()
    def decode(self, lanes: Many[LaneId], now: float) -> list[StepOut]:
        """One round: every lane's pending token is processed and the next one chosen, in one batch.

        Lanes without a page to grow into come back Short and are left as they were. A pass that runs out of
        memory fails its lanes.

        Raises:
            ValueError: a lane's prompt is not prefilled, or no token of it waits. Nothing was computed.
        """
        torch.set_num_threads(self.resolved.decode_threads)
        for s in (self._lanes[lane] for lane in lanes):
            if not s.failed and (s.prefilling or not s.waiting):
                raise ValueError(f"decode: lane {s.lane.id} has no pending token")
        out: dict[LaneId, StepOut] = {}
        batch: list[Sequence] = []
        for lane in lanes:
            s = self._lanes[lane]
            if s.failed:
                out[lane] = attrs.evolve(_NOTHING, outcome=Outcome.FAILED)
                continue
            grown = self._index.grow(lane, len(s.waiting), now)
            if isinstance(grown, Short):
                out[lane] = attrs.evolve(
                    _NOTHING, outcome=Outcome.SHORT, landing=grown.landing >= grown.missing
                )
                self._counters["decode_short"] += 1
                continue
            out[lane] = attrs.evolve(_NOTHING, outcome=Outcome.FAILED)
            with self._pass([s]):
                self._advance(s, len(s.waiting) - 1, now)
                batch.append(s)
        if batch:
            with self._pass(batch):
                out.update(zip((s.lane.id for s in batch), self._round(batch, now), strict=True))
        return [out[lane] for lane in lanes]

    @contextmanager
    def _pass(self, batch: list[Sequence]) -> Iterator[None]:
        """A forward pass. One that ends early leaves states half moved, so its lanes publish nothing more.

        No memory for it is these lanes' misfortune; a device that broke is everybody's, and is raised.
        """
        try:
            yield
        except BaseException as error:
            for s in batch:
                s.failed = True
            if not isinstance(error, RuntimeError) or isinstance(error, torch.AcceleratorError):
                raise
            _log.exception("a forward pass of lanes %s failed", [s.lane.id for s in batch])
            self._counters["passes_failed"] += 1

    def _round(self, batch: list[Sequence], now: float) -> list[StepOut]:
        tokens = [s.waiting[0] for s in batch]
        hidden = self._model.decode(
            torch.tensor(tokens),
            [s.lane.frontier for s in batch],
            [s.lane.slot for s in batch],
            [s.row for s in batch],
        )
        logits = self._model.logits(hidden)
        for s in batch:
            self._commit(s, s.take_waiting(1), now)
            s.processed(1)
            self._tap_boundary(s, now)
        self._counters["decode_rounds"] += 1
        self._counters["decode_tokens"] += len(batch)
        return self._choose(logits, batch)

    def _advance(self, s: Sequence, count: int, now: float) -> None:
        """Process `count` waiting tokens in one pass, or two if a snapshot is due between them."""
        while count:
            step = count
            if s.boundary is not None and 0 < s.boundary - s.lane.frontier < count:
                step = s.boundary - s.lane.frontier
            self._forward(s, s.take_waiting(step), now)
            s.processed(step)
            self._counters["forced_tokens"] += step
            self._tap_boundary(s, now)
            count -= step

    def _forward(self, s: Sequence, tokens: Int32Buffer, now: float) -> torch.Tensor:
        """One pass over one lane's next tokens; the last one's hidden state, float [hidden]."""
        ids = torch.from_numpy(tokens)
        hidden = self._model.prefill(ids, s.lane.frontier, s.lane.slot, s.row)
        self._commit(s, tokens, now)
        return hidden

    def _commit(self, s: Sequence, tokens: Int32Buffer, now: float) -> None:
        frontier = s.lane.frontier + len(tokens)
        plans = self._index.commit(s.lane.id, tokens, (frontier,), now)
        if plans:
            self._run(plans, now)

    def _tap_boundary(self, s: Sequence, now: float) -> None:
        if s.boundary is None or s.lane.frontier < s.boundary:
            return
        s.boundary = None
        plans = self._index.tap(s.lane.id, SnapshotKind.OUTPUT_BOUNDARY, now)
        if not isinstance(plans, Skipped):
            self._run(plans, now)

    def _choose(self, logits: torch.Tensor, batch: list[Sequence]) -> list[StepOut]:
        steps = []
        for s, choice in zip(batch, choose(logits, [s.sampler for s in batch]), strict=True):
            if isinstance(choice, Unsampled):
                _log.error("lane %d: %s", s.lane.id, choice.why)
                self._counters["unsampled"] += 1
                s.failed = True
                steps.append(attrs.evolve(_NOTHING, outcome=Outcome.FAILED))
                continue
            s.append([choice.token], chosen=1)
            stops = choice.token in s.request.stop_tokens and not s.request.ignore_eos
            logprobs: tuple[TokenLogprobs, ...] = () if choice.logprobs is None else (choice.logprobs,)
            steps.append(
                StepOut(
                    tokens=np.array([choice.token], dtype=np.int32),
                    logprobs=logprobs,
                    outcome=Outcome.STOPPED if stops else Outcome.TOKENS,
                )
            )
        return steps

    # Between rounds

    def keep(self, lane: LaneId, n: int, now: float) -> None:
        """Keep the first n tokens of the last step's; the rest never becomes part of the sequence."""
        self._lanes[lane].keep(n)

    def force(self, lane: LaneId, tokens: Int32Buffer, now: float) -> None:
        """Continue with these tokens: the next round processes them, the last one with the batch.

        Raises:
            ValueError: no tokens, or one outside the vocabulary.
        """
        ids = tokens.tolist()
        if not ids or not all(0 <= t < self._addressable for t in ids):
            raise ValueError(
                f"forced tokens {ids[:8]}: must be one or more ids within [0, {self._addressable})"
            )
        s = self._lanes[lane]
        s.append(ids, chosen=0)
        s.sampler.record(ids)

    def boundary(self, lane: LaneId, now: float) -> None:
        """Snapshot the state right after the last known token, once it is processed (§12.3)."""
        s = self._lanes[lane]
        s.boundary = s.end
        self._tap_boundary(s, now)

    def finish(self, lane: LaneId, how: Finish, now: float) -> Suspended | None:
        """End a lane in any state; what it computed stays reusable (§7.7).

        A failed lane leaves no endpoint, since its state is not that of its tokens. Suspended, it resumes
        from what was kept before.
        """
        s = self._lanes.pop(lane)
        suspended = s.suspended() if how.how is Ending.SUSPENDED else None
        if s.failed:
            how = Finish(Ending.FAILED)
        self._run(self._index.finish(lane, how, now), now)
        return suspended

    def stats(self) -> ProgramStats:
        """Gauges and counters, consistent at this moment."""
        counters = dict(self._counters)
        counters["restored_bytes"] = self._copies.restored_bytes
        counters["written_bytes"] = self._copies.written_bytes
        return ProgramStats(index=self._index.stats(), counters=counters)

    def close(self) -> None:
        """Release every lane; copies have all landed. Nothing may be called afterwards."""
        for lane in list(self._lanes):
            self.finish(lane, Finish(Ending.CANCELLED), 0.0)

    # Plans

    def _run(self, plans: Plans, now: float) -> int:
        """Carry out plans in order and report each one's end; the bytes moved between the tiers."""
        moved = 0
        for plan in plans:
            done = None if not self._broken.isdisjoint(plan.after) else self._copy(plan)
            if done is None:
                self._broken.add(plan.ticket)
                self._counters[f"copies_failed.{plan.stream.value}"] += 1
            else:
                moved += done
            for lane in self._index.landed(plan.ticket, done is not None, now):
                if lane in self._lanes:
                    self._lanes[lane].failed = True
            self._landed = True
        return moved

    def _copy(self, plan: Plan) -> int | None:
        """Bytes moved between the tiers, or None if the device refused a copy."""
        try:
            return self._copies.run(plan)
        except RuntimeError:
            _log.exception("a copy of plan %d on the %s stream failed", plan.ticket, plan.stream.value)
            return None

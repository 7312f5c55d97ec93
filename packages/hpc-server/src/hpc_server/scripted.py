"""A program without a model: the real index, ledgers and copy plans over digests (design §2).

Every pass first compares all that it would read with the digests of the lane's own tokens, so that any
wrong reuse raises at the step that would have used it. Replies are scripted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from hpc_index import CostModel, Policy, PrefixIndex, preset
from hpc_index.ids import Int32Buffer, LaneId
from hpc_index.records import (
    Ending,
    Finish,
    Geometry,
    IndexStats,
    Lane,
    Pool,
    Quote,
    Short,
    SnapshotKind,
    Stale,
)
from hpc_index.requests import Outcome, PrefillStep, Request, StepOut, Suspended, TokenLogprobs
from hpc_server.scripted_memory import DigestMemory, PrefixDigests
from hpc_server.scripted_replies import FileReplies, Replies
from hpc_server.scripted_transfers import Faults, Transfers
from hpc_server.tokenizer import Tokenizer

__all__ = ["ScriptedOptions", "ScriptedProgram", "ScriptedStats"]


def _default_geometry() -> Geometry:
    return Geometry(
        block=64,
        unit=1,
        pools=(Pool("main", pages=2048, lag=0, page_bytes=4096),),
        lanes=4,
        slots=12,
        image_bytes=16384,
        slab_bytes=4096,
        slabs=8192,
        slabs_per_chunk=1024,
    )


@attrs.frozen
class ScriptedOptions:
    """Sizes, speed and faults.

    prefill_tokens_per_s, decode_steps_per_s: virtual speed, slept; infinite by default.
    tokens_per_step: tokens that a decode round gives a lane, as a speculative model would.
    taps_inside: take exact taps inside a chunk instead of ending it there (§7.3).
    """

    geometry: Geometry = attrs.field(factory=_default_geometry)
    policy: Policy = attrs.field(factory=Policy)
    cost: CostModel = attrs.field(factory=lambda: preset("generic"))
    max_context: int = 32768
    prefill_tokens_per_s: float = math.inf
    decode_steps_per_s: float = math.inf
    tokens_per_step: int = 1
    taps_inside: bool = False
    faults: Faults = attrs.field(factory=Faults)


@attrs.frozen(eq=False)
class ScriptedStats:
    """Counters at one moment; fits `ProgramStats`."""

    index: IndexStats
    counters: Mapping[str, int]


@attrs.define(eq=False)
class _Lane:
    """One running sequence.

    tokens chosen so far split in three: processed ones are in `digests`, then `unsettled` ones that a
    multi-token step chose beyond the pending one before it, then the pending one. `asked` is the prompt of
    the request as it first came; after a suspension the prompt is longer.
    """

    lane: Lane
    request: Request
    digests: PrefixDigests
    asked: Int32Buffer
    reply: Int32Buffer
    position: int
    generated: int
    unsettled: list[int] = attrs.field(factory=list)
    pending: int | None = None
    last_step: int = 0
    boundary: bool = False


@attrs.frozen(eq=False)
class _Payload:
    asked: Int32Buffer
    reply: Int32Buffer
    position: int


class ScriptedProgram:
    """Fits `Program`. Raises WrongReuseError from the step that would read wrong bytes."""

    def __init__(
        self,
        replies: Replies,
        *,
        vocab_size: int,
        options: ScriptedOptions | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.options = options if options is not None else ScriptedOptions()
        self._vocab_size = vocab_size
        self._replies = replies
        self._sleep = sleep
        geometry = self.options.geometry
        self.index = PrefixIndex(geometry, self.options.cost, self.options.policy)
        self._memory = DigestMemory(geometry)
        self._transfers = Transfers(self.index, self._memory, geometry, self.options.faults)
        self._lanes: dict[LaneId, _Lane] = {}
        self._counts = {"prefill_tokens": 0, "prefill_chunks": 0, "decode_steps": 0, "decode_lanes": 0}

    @classmethod
    def from_file(
        cls, path: Path, tokenizer: Tokenizer, options: ScriptedOptions | None = None
    ) -> ScriptedProgram:
        """A program that answers from a script (see `FileReplies`). Raises ScriptFileError."""
        return cls(FileReplies(path, tokenizer), vocab_size=tokenizer.vocab_size, options=options)

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence."""
        return self.options.max_context

    @property
    def vocab_size(self) -> int:
        """Token ids are [0, vocab_size)."""
        return self._vocab_size

    def quote(self, r: Request, now: float) -> Quote:
        """What admission would do."""
        return self.index.quote(r.prompt, r.max_new, now)

    def admit(self, q: Quote, r: Request, now: float, resume: Suspended | None) -> LaneId | Stale:
        """Start a request; a resumed one goes on in its reply where it stopped."""
        if resume is None:
            asked = r.prompt.tokens
            reply, position, generated = self._replies.reply(asked), 0, 0
        else:
            payload = resume.payload
            if not isinstance(payload, _Payload):
                raise TypeError(f"resume payload is {type(payload).__name__}, not one of this program")
            asked = payload.asked
            reply, position, generated = payload.reply, payload.position, resume.generated
        staged = self.index.stage(q, r.prompt, now)
        if isinstance(staged, Stale):
            return staged
        lane, plans = staged
        self._transfers.enqueue(plans, now)
        self._transfers.enqueue(self.index.activate(lane.id, now), now, lane=lane.id)
        digests = PrefixDigests(r.prompt, self.options.geometry.block)
        self._lanes[lane.id] = _Lane(lane, r, digests, asked, reply, position, generated)
        return lane.id

    def prefill(self, lane: LaneId, budget: int, now: float) -> PrefillStep:
        """One chunk."""
        state = self._lanes[lane]
        n = len(state.request.prompt.tokens)
        if self._transfers.broken(lane, now):
            return PrefillStep(state.lane.frontier, done=False, first=None, failed=True)
        chunk = self.index.next_chunk(lane, budget, self.options.taps_inside, now)
        begin = state.lane.frontier
        grown = self.index.grow(lane, chunk.end - begin, now)
        if isinstance(grown, Short):
            landing = grown.landing >= grown.missing
            return PrefillStep(begin, done=False, first=None, short=True, landing=landing)
        self._memory.verify(state.lane, state.digests)
        self._rest((chunk.end - begin) / self.options.prefill_tokens_per_s)
        self._advance(state, chunk.end, {tap.position: tap.slot for tap in chunk.taps}, now)
        self._counts["prefill_tokens"] += chunk.end - begin
        self._counts["prefill_chunks"] += 1
        done = chunk.end >= n
        return PrefillStep(chunk.end, done, self._choose(state, 1) if done else None)

    def decode(self, lanes: Sequence[LaneId], now: float) -> list[StepOut]:
        """One round."""
        self._rest(1 / self.options.decode_steps_per_s)
        self._counts["decode_steps"] += 1
        self._counts["decode_lanes"] += len(lanes)
        return [self._decode_one(self._lanes[lane], now) for lane in lanes]

    def keep(self, lane: LaneId, n: int, now: float) -> None:
        """Forget the last step's tokens after the first n."""
        del now
        state = self._lanes[lane]
        chosen = [*state.unsettled, state.pending]
        if not 1 <= n <= state.last_step:
            raise ValueError(f"keep: n is {n}; the last step gave {state.last_step} tokens")
        dropped = state.last_step - n
        kept = chosen[: len(chosen) - dropped]
        state.pending = kept.pop()
        state.unsettled = [token for token in kept if token is not None]
        state.position -= dropped
        state.generated -= dropped
        state.last_step = n

    def force(self, lane: LaneId, tokens: Int32Buffer, now: float) -> None:
        """Continue with these tokens instead of scripted ones, the last one pending."""
        del now
        state = self._lanes[lane]
        if state.pending is None or not len(tokens):
            raise ValueError(f"force: lane {lane} has no pending token, or none was given")
        state.unsettled += [state.pending, *tokens[:-1].tolist()]
        state.pending = int(tokens[-1])
        state.generated += len(tokens)

    def boundary(self, lane: LaneId, now: float) -> None:
        """Snapshot after the pending token, in the next round."""
        del now
        self._lanes[lane].boundary = True

    def finish(self, lane: LaneId, how: Finish, now: float) -> Suspended | None:
        """End a lane. Chosen tokens that others follow are settled first: the endpoint has them."""
        state = self._lanes[lane]
        if how.how in (Ending.DONE, Ending.CANCELLED, Ending.SUSPENDED) and state.unsettled:
            room = self.index.grow(lane, len(state.unsettled), now)
            if not isinstance(room, Short) and not self._transfers.broken(lane, now):
                self._settle(state, state.unsettled, now)
                state.unsettled = []
        self._transfers.forget(lane)
        del self._lanes[lane]
        self._transfers.enqueue(self.index.finish(lane, how, now), now)
        if how.how is not Ending.SUSPENDED:
            return None
        pending = [] if state.pending is None else [*state.unsettled, state.pending]
        tokens = np.concatenate([state.digests.tokens, np.array(pending, dtype=np.int32)])
        return Suspended(tokens, state.generated, _Payload(state.asked, state.reply, state.position))

    def prefetch(self, r: Request, now: float) -> int:
        """Bytes on their way to spare pages."""
        plans = self.index.prefetch(r.prompt, now)
        if plans is None:
            return 0
        self._transfers.enqueue(plans, now)
        pools = self.options.geometry.pools
        return sum(len(copy.src) * pools[copy.pool].page_bytes for plan in plans for copy in plan.copies)

    def poll(self, now: float) -> bool:
        """Land what is due."""
        return self._transfers.poll(now)

    def stats(self) -> ScriptedStats:
        """Counters."""
        return ScriptedStats(self.index.stats(), {**self._counts, **self._transfers.counters})

    def close(self) -> None:
        """End all lanes and land everything."""
        for lane in tuple(self._lanes):
            self.finish(lane, Finish(Ending.CANCELLED), 0.0)
        self._transfers.poll(math.inf)

    def _decode_one(self, state: _Lane, now: float) -> StepOut:
        lane = state.lane.id
        none = np.empty(0, np.int32)
        if state.pending is None:
            raise ValueError(f"decode: the prompt of lane {lane} is not done")
        if self._transfers.broken(lane, now):
            return StepOut(none, (), Outcome.FAILED)
        new = [*state.unsettled, state.pending]
        # Room for what this round will choose ahead, so that settling it at the end cannot fail.
        grown = self.index.grow(lane, len(new) + self.options.tokens_per_step - 1, now)
        if isinstance(grown, Short):
            return StepOut(none, (), Outcome.SHORT, grown.landing >= grown.missing)
        self._memory.verify(state.lane, state.digests)
        self._settle(state, new, now)
        if state.boundary:
            state.boundary = False
            made = self.index.tap(lane, SnapshotKind.OUTPUT_BOUNDARY, now)
            if isinstance(made, tuple):
                self._transfers.enqueue(made, now)
        return self._choose(state, self.options.tokens_per_step)

    def _settle(self, state: _Lane, tokens: list[int], now: float) -> None:
        """Process chosen tokens: they become part of the sequence."""
        state.digests.extend(np.array(tokens, dtype=np.int32))
        self._advance(state, len(state.digests), {}, now)

    def _advance(self, state: _Lane, end: int, taps: dict[int, int], now: float) -> None:
        self._memory.advance(state.lane, state.digests, end, taps)
        frontiers = tuple(max(0, end - pool.lag) for pool in self.options.geometry.pools)
        new = state.digests.tokens[state.lane.frontier : end].copy()
        self._transfers.enqueue(self.index.commit(state.lane.id, new, frontiers, now), now)

    def _choose(self, state: _Lane, most: int) -> StepOut:
        """The next tokens of the reply; a stop token ends the step."""
        request = state.request
        chosen: list[int] = []
        outcome = Outcome.TOKENS
        while len(chosen) < most and outcome is Outcome.TOKENS:
            chosen.append(self._token(state))
            state.position += 1
            if chosen[-1] in request.stop_tokens and not request.ignore_eos:
                outcome = Outcome.STOPPED
        state.generated += len(chosen)
        state.last_step = len(chosen)
        state.unsettled, state.pending = chosen[:-1], chosen[-1]
        logprobs = () if request.sampling.logprobs is None else tuple(map(self._logprobs(request), chosen))
        return StepOut(np.array(chosen, dtype=np.int32), logprobs, outcome)

    def _token(self, state: _Lane) -> int:
        request = state.request
        if state.position < len(state.reply):
            return int(state.reply[state.position])
        if request.stop_tokens and not request.ignore_eos and len(state.reply):
            return min(request.stop_tokens)
        return self._replies.filler(state.asked, state.position)

    def _logprobs(self, request: Request) -> Callable[[int], TokenLogprobs]:
        """Each next most likely token has half the probability of the one before."""
        count = request.sampling.logprobs or 0

        def of(token: int) -> TokenLogprobs:
            top = tuple(((token + i) % self._vocab_size, -(i + 1) * math.log(2)) for i in range(count))
            return TokenLogprobs(-math.log(2), top)

        return of

    def _rest(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)

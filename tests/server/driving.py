"""A worker driven by hand, without threads or sockets, for tests of scheduling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import attrs
import numpy as np

from hpc_index import check_invariants
from hpc_index.records import PromptView
from hpc_index.requests import Request, Sampling
from hpc_server.contracts import Program
from hpc_server.events import (
    Event,
    EventStream,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Report,
    Started,
    TextOutput,
    Tokens,
)
from hpc_server.options import EngineOptions
from hpc_server.scheduler import Submission
from hpc_server.scripted import ScriptedOptions, ScriptedProgram
from hpc_server.scripted_replies import HashReplies
from hpc_server.worker import Worker
from tests.server.served import small

EOS = 7
VOCAB = 512


class _DirectLoop:
    """Stands for an event loop: what is called soon is called now."""

    def call_soon_threadsafe(self, call: Callable[..., object], *args: object) -> None:
        call(*args)


class Collected(EventStream):
    """Keeps all events."""

    def __init__(self) -> None:
        super().__init__(cast("asyncio.AbstractEventLoop", _DirectLoop()))
        self.events: list[Event] = []

    def deliver(self, event: Event) -> None:
        self.events.append(event)

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Tokens) for token in event.ids]

    @property
    def last(self) -> Finished | Failed | None:
        event = self.events[-1] if self.events else None
        return event if isinstance(event, Finished | Failed) else None

    @property
    def started(self) -> Started | None:
        return next((event for event in self.events if isinstance(event, Started)), None)


def request(
    tokens: Sequence[int],
    max_new: int = 8,
    *,
    salt: bytes = b"",
    cacheable: bool = True,
    ignore_eos: bool = False,
    logprobs: int | None = None,
) -> Request:
    prompt = PromptView(np.array(tokens, dtype=np.int32), cache_salt=salt, cacheable=cacheable)
    return Request(prompt, max_new, Sampling(logprobs=logprobs), frozenset({EOS}), ignore_eos)


@attrs.define(eq=False)
class Driver:
    """A worker over a scripted program, with a clock that moves by hand."""

    program: ScriptedProgram
    outer: Program
    worker: Worker
    now: list[float]
    reports: list[Report]
    count: int = 0

    @classmethod
    def over(
        cls,
        program: ScriptedProgram,
        options: EngineOptions | None = None,
        outer: Program | None = None,
    ) -> Driver:
        now, reports = [0.0], list[Report]()
        used = outer if outer is not None else program
        made = options or EngineOptions(prefill_chunk=32)
        worker = Worker(used, made, lambda: now[0], lambda _job, report: reports.append(report))
        return cls(program, used, worker, now, reports)

    def submit(self, wanted: Request, text: TextOutput | None = None) -> Collected:
        stream = Collected()
        self.count += 1
        self.worker.submit(Submission(f"r{self.count}", wanted, stream, text), self.now[0])
        return stream

    def round(self) -> bool:
        self.now[0] += 0.01
        busy = self.worker.round()
        check_invariants(self.program.index)
        return busy

    def run(self, rounds: int = 2000) -> None:
        """Rounds until no request is left and every copy has landed."""
        for _ in range(rounds):
            if not self.worker.scheduler.everything():
                break
            self.round()
        assert not self.worker.scheduler.everything(), "requests are left over"
        self.settle()

    def settle(self) -> None:
        """Land everything and check that nothing but cache is left."""
        for _ in range(100):
            self.now[0] += 1.0
            self.worker.poll()
            if not self.program.index.stats().tickets_open:
                break
        check_invariants(self.program.index)
        stats = self.program.index.stats()
        shape = self.program.options.geometry
        assert (stats.lanes, stats.tickets_open, stats.slots_active) == (0, 0, 0)
        assert stats.pages_active == (0,) * len(shape.pools)
        assert stats.pages_filling == (0,) * len(shape.pools)

    @property
    def lanes(self) -> int:
        return self.program.index.stats().lanes


REPLIES = HashReplies(low=100, high=400)
"""Goes on for as long as it may; no stop token among its tokens."""


def driver(options: ScriptedOptions | None = None, replies: HashReplies = REPLIES) -> Driver:
    return Driver.over(ScriptedProgram(replies, vocab_size=VOCAB, options=options or small()))


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(10, 100, n)]


def expected(tokens: Sequence[int], count: int) -> list[int]:
    """What the script says after this prompt, cache or not."""
    array = np.array(tokens, dtype=np.int32)
    return [REPLIES.filler(array, i) for i in range(count)]


def reason(stream: Collected) -> FinishReason:
    assert isinstance(stream.last, Finished)
    return stream.last.reason


def failure(stream: Collected) -> FailureKind:
    assert isinstance(stream.last, Failed)
    return stream.last.kind

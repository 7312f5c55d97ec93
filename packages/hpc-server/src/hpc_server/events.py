"""What a request's consumer is told, and how it gets from the worker thread to an event loop.

The worker posts into an `Outbox`; once a round, everything posted since goes to each loop in one
`call_soon_threadsafe`. An `EventStream` only appends, so a slow or vanished client never holds the worker
up: what it leaves unread is bounded by its own max_new.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import attrs

from hpc_index.records import Reason
from hpc_index.requests import TokenLogprobs

__all__ = [
    "Event",
    "EventStream",
    "Failed",
    "FailureKind",
    "FinishReason",
    "Finished",
    "Outbox",
    "Report",
    "Started",
    "TextDelta",
    "TextOutput",
    "Tokens",
]


class TextDelta(Protocol):
    """A piece of reply text; kind is "reasoning" or "content"."""

    @property
    def kind(self) -> str:
        """Which part of the reply it belongs to."""

    @property
    def text(self) -> str:
        """Never empty, never half a character."""


class TextOutput(Protocol):
    """Turns generated tokens into text and finds stop strings. Used by one thread at a time."""

    def feed(self, token_ids: Sequence[int]) -> Sequence[TextDelta]:
        """Text that these tokens complete."""

    def finish(self) -> Sequence[TextDelta]:
        """Text held back so far."""

    @property
    def stopped(self) -> bool:
        """A stop string was found; text after it is never given out."""


class FinishReason(enum.Enum):
    """How a request ended that did not fail."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class FailureKind(enum.Enum):
    """Why a request failed."""

    INFEASIBLE = "infeasible"
    """It needs more than the pools have; it never could run."""
    PROGRAM = "program"
    """The model's step for it raised or its restore failed; other requests go on."""
    STOPPING = "stopping"
    """The server is shutting down."""
    UNHEALTHY = "unhealthy"
    """The engine cannot go on."""
    QUEUE_FULL = "queue_full"
    """Too many requests wait already."""


@attrs.frozen
class Report:
    """What one request did, for the log line and the metrics. Times are seconds, sizes bytes.

    reused, matched, stopped_by, restored_bytes: of its first admission's quote.
    prefilled: prompt tokens computed, those after a suspension included.
    queued_s: until first admission. ttft_s: until the first token. None where it did not come to that.
    decode_s: first to last token.
    """

    id: str
    outcome: str
    prompt_tokens: int
    reused: int = 0
    matched: int = 0
    stopped_by: Reason | None = None
    restored_bytes: int = 0
    prefilled: int = 0
    generated: int = 0
    suspensions: int = 0
    queued_s: float | None = None
    ttft_s: float | None = None
    decode_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed from the first token to the last, None below two tokens."""
        if self.generated < 2 or self.decode_s <= 0:
            return None
        return (self.generated - 1) / self.decode_s


@attrs.frozen
class Started:
    """The request has a lane. Sent once; a resume after a suspension is silent."""

    prompt_tokens: int
    reused: int
    matched: int


@attrs.frozen(eq=False)
class Tokens:
    """Newly chosen tokens.

    logprobs: one a token when asked for, else empty.
    closing: the last id is the stop token that ended the request; it has no text.
    deltas: the text of these tokens if the worker drives the request's `TextOutput`, else None.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    closing: bool = False
    deltas: tuple[TextDelta, ...] | None = None


@attrs.frozen
class Finished:
    """The last event of a request that ended in order."""

    reason: FinishReason
    report: Report


@attrs.frozen
class Failed:
    """The last event of a request that did not."""

    kind: FailureKind
    message: str
    report: Report | None = None


Event: TypeAlias = Started | Tokens | Finished | Failed


class EventStream:
    """One request's events, read on the event loop on which the stream was made."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: list[Event] = []
        self._ready = asyncio.Event()
        self._ended = False

    def deliver(self, event: Event) -> None:
        """Append an event; on the loop. What follows a last event is not part of the request."""
        if self._ended:
            return
        self._events.append(event)
        self._ended = isinstance(event, Finished | Failed)
        self._ready.set()

    async def read(self, timeout_s: float) -> list[Event]:
        """All events that came since the last read; empty after timeout_s without one."""
        if not self._events:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
            except TimeoutError:
                return []
        self._ready.clear()
        events, self._events = self._events, []
        return events


class Outbox:
    """Collects a round's events and hands them over loop by loop."""

    def __init__(self) -> None:
        self._batches: dict[asyncio.AbstractEventLoop, list[tuple[EventStream, Event]]] = {}
        self.undeliverable = 0

    def post(self, stream: EventStream, event: Event) -> None:
        """Queue an event until the next flush."""
        self._batches.setdefault(stream.loop, []).append((stream, event))

    def flush(self) -> None:
        """Hand over everything posted. Events for a loop that has closed are counted and dropped."""
        if not self._batches:
            return
        batches, self._batches = self._batches, {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed: its clients are gone
                self.undeliverable += len(batch)


def _deliver(batch: list[tuple[EventStream, Event]]) -> None:
    for stream, event in batch:
        stream.deliver(event)

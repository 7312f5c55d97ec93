"""One request seen from the event loop: events of the engine in, pieces of an answer out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import attrs
import numpy as np

from hpc_index.ids import Int32Buffer
from hpc_index.requests import Request
from hpc_server.engine import Engine, RejectedError
from hpc_server.events import (
    Event,
    EventStream,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Started,
    TextOutput,
    Tokens,
)
from hpc_server.protocols.answer import Envelope, Piece
from hpc_server.protocols.errors import from_failure
from hpc_server.scheduler import Submission

__all__ = ["Generation", "ReplyText"]


class ReplyText(TextOutput, Protocol):
    """The text side of one reply."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reply so far that belong to its reasoning."""


class Generation:
    """Submits a request and yields its answer piece by piece. Make and use it on one event loop.

    Without stop strings the text is made here, so that the worker does no text work; with them the
    worker must know at once where the reply ends, and makes it there.

    ids: generated tokens so far. reason: how it ended, None before.
    """

    def __init__(
        self,
        engine: Engine,
        stream: EventStream,
        request: Request,
        text: ReplyText,
        envelope: Envelope,
        *,
        text_on_worker: bool,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._text = text
        self._envelope = envelope
        self._submission = Submission(envelope.id, request, stream, text if text_on_worker else None)
        self.ids: list[int] = []
        self.reason: FinishReason | None = None

    def ids_array(self) -> Int32Buffer:
        """The generated ids so far, int32 [k]."""
        return np.array(self.ids, dtype=np.int32)

    def submit(self) -> None:
        """Hand the request to the engine. Raises RequestError if it is refused."""
        try:
            self._engine.submit(self._submission)
        except RejectedError as error:
            raise from_failure(error.kind, str(error)) from error

    def cancel(self) -> None:
        """The client is gone. Does nothing once the request is over."""
        if self.reason is None:
            self._engine.cancel(self._submission.id)

    async def pieces(self, quiet_s: float) -> AsyncIterator[Piece | None]:
        """Pieces until the request is over; None after quiet_s without news. Raises RequestError if it fails.

        A request whose engine no longer lives fails, rather than being kept alive by pings.
        """
        while self.reason is None:
            events = await self._stream.read(quiet_s)
            if not events:
                if not self._engine.alive:
                    raise from_failure(FailureKind.UNHEALTHY, f"the engine stopped: {self._engine.why}")
                yield None
                continue
            piece = self._absorb(events)
            if piece is not None:
                yield piece

    def _absorb(self, events: list[Event]) -> Piece | None:
        """All that came since the last read, as one piece: a slow client gets fewer, larger chunks."""
        new = Piece()
        tail: Piece | None = None
        for event in events:
            if isinstance(event, Tokens):
                new = _joined(new, self._tokens(event))
            elif isinstance(event, Started):
                self._envelope.cached = event.reused
            elif isinstance(event, Finished):
                self.reason = event.reason
                tail = Piece(deltas=tuple(self._text.finish()))
            else:
                raise self._failed(event)
        self._envelope.completion = len(self.ids)
        self._envelope.reasoning = self._text.reasoning_tokens
        if tail is not None and tail.deltas:
            new = _joined(new, tail)
        return new if new.ids or new.deltas else None

    def _tokens(self, event: Tokens) -> Piece:
        self.ids.extend(event.ids)
        shown = event.ids[:-1] if event.closing else event.ids
        deltas = event.deltas if event.deltas is not None else tuple(self._text.feed(shown))
        return Piece(event.ids, shown if event.logprobs else (), event.logprobs[: len(shown)], deltas)

    def _failed(self, event: Failed) -> Exception:
        return from_failure(event.kind, event.message)


def _joined(a: Piece, b: Piece) -> Piece:
    deltas = list(a.deltas)
    for delta in b.deltas:
        last = deltas[-1] if deltas else None
        if last is not None and last.kind == delta.kind:
            deltas[-1] = _Text(last.kind, last.text + delta.text)
        else:
            deltas.append(delta)
    return Piece(a.ids + b.ids, a.shown + b.shown, a.logprobs + b.logprobs, tuple(deltas))


@attrs.frozen
class _Text:
    kind: str
    text: str

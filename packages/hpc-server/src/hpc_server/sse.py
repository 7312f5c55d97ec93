"""Server-sent events: an ASGI response that notices a vanished client while it waits for the model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import TypeVar

import orjson
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "PING", "ClientGoneError", "EventStreamResponse", "or_disconnect", "sse"]

_T = TypeVar("_T")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment: clients ignore it, proxies and idle timers see that the connection lives."""


class ClientGoneError(Exception):
    """The client closed the connection."""


def sse(value: Mapping[str, object]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def or_disconnect(work: Awaitable[_T], receive: Receive) -> _T:
    """The result of `work`, which is cancelled when the client goes first. Raises ClientGoneError then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        # Also reached when this task itself is cancelled; neither child may outlive it.
        for child in (task, gone):
            child.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Returns once the client is gone. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse:
    """Sends events as they come. `events` is closed in every case, so that it can release what it holds."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self._events = events
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the response until it is complete or the client leaves."""
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(ClientGoneError):  # closing `events` is all there is to do
                await or_disconnect(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

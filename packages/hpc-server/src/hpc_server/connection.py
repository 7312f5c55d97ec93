"""One HTTP connection: uvicorn's, with bounds on what comes before a body, and errors in our shape.

uvicorn's own bounds hold for h11 only, and for no implementation in time. A head here is bounded in bytes and
in seconds, also when nothing of it ever arrives; bodies are bounded where they are read.
"""

from __future__ import annotations

import asyncio
import http
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hpc_server.limits import HEAD_TIMEOUT_S, MAX_HEAD_BYTES
from hpc_server.protocols.errors import RequestError

__all__ = ["Connection"]


class Connection(HttpToolsProtocol):
    """Closes a connection whose request head is too long, too slow, or no HTTP.

    max_head_bytes: of the request line and all headers. head_timeout_s: from a connection's start, or a
    request's first byte, until its head is complete.
    """

    max_head_bytes = MAX_HEAD_BYTES
    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        # True before a head and inside one. Bytes are counted by reads that lie wholly there: httptools joins
        # the parts of one header itself, and shows it only when it is complete.
        self._in_head = True
        self._whole_read = True
        self._head_bytes = 0
        self._refusal: RequestError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of it came."""
        if self.transport.is_closing():
            return
        self._whole_read = self._in_head
        super().data_received(data)
        if self.transport.is_closing() or not self._whole_read:
            return
        self._head_bytes += len(data)
        if self._head_bytes > self.max_head_bytes:
            self._refuse(self._too_long())
        elif self._timer is None:
            self._arm()

    def on_message_begin(self) -> None:
        """The parser saw a request begin."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole. Raising makes the parser give up, and `send_400_response` say why."""
        self._disarm()
        self._in_head = self._whole_read = False
        self._head_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_head_bytes:
            self._refusal = self._too_long()
            raise ValueError("the head is too long")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole."""
        super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        """What the parser did not take: our refusal if there is one."""
        if self._refusal is None:
            self._refusal = RequestError(400, msg, kind="invalid_request_error", code="invalid_http")
        self._refuse(self._refusal)

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._answering():
            self._arm()  # stray bytes behind a request must not cost it its answer
        elif self._head_bytes:
            text = f"the request's head took longer than {self.head_timeout_s:g} s"
            self._refuse(RequestError(408, text, kind="invalid_request_error", code="timeout"))
        else:
            self.transport.close()

    def _too_long(self) -> RequestError:
        text = f"the request's head is longer than {self.max_head_bytes} bytes"
        return RequestError(431, text, kind="invalid_request_error", code="headers_too_large")

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _broken_body(self) -> bool:
        """Is the fault in the body of the only open request, whose answer has not begun?"""
        return self.cycle.more_body and not self.cycle.response_started and not self.pipeline

    def _refuse(self, error: RequestError) -> None:
        """Answer and close. In the middle of another request's answer only closing is left."""
        self._disarm()
        if not self._answering() or self._broken_body():
            body = orjson.dumps(error.body())
            phrase = http.HTTPStatus(error.status).phrase
            head = (
                f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()

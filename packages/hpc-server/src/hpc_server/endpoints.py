"""The two POST endpoints: body in, checked request to the engine, answer out, streamed or whole."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import attrs
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from hpc_index.requests import Request
from hpc_server.engine import Engine
from hpc_server.events import EventStream, FinishReason
from hpc_server.frontend import Frontend, Prepared
from hpc_server.generation import Generation
from hpc_server.guard import error_response, key_salt
from hpc_server.metrics import Metrics
from hpc_server.options import ServerOptions
from hpc_server.output import OutputStream
from hpc_server.protocols.answer import Answer, Envelope, Piece
from hpc_server.protocols.body import parse_body
from hpc_server.protocols.common import Common, ModelLimits
from hpc_server.protocols.errors import RequestError, not_valid
from hpc_server.protocols.openai_chat import ChatAnswer, read_chat
from hpc_server.protocols.openai_completions import CompletionAnswer, read_completion
from hpc_server.sse import DONE, PING, ClientGoneError, EventStreamResponse, or_disconnect, sse
from hpc_server.text_errors import FrontendError, PromptTooLongError

__all__ = ["Endpoints"]

_log = logging.getLogger(__name__)
_MAX_KNOWN_CLIENTS = 4096


@attrs.frozen(eq=False)
class _Asked:
    """A checked request, about to be rendered. render: takes cache_salt and cacheable."""

    common: Common
    render: Callable[[bytes, bool], Prepared]


@attrs.frozen(eq=False)
class _Run:
    """A submitted request. first: its first piece, None after ping_s without one."""

    generation: Generation
    prepared: Prepared
    text: OutputStream
    answer: Answer
    pieces: AsyncIterator[Piece | None]
    first: Piece | None


_Read: TypeAlias = Callable[[Mapping[str, object]], _Asked]


class Endpoints:
    """Handlers for one app. Rendering runs on a thread of its own, one request at a time."""

    def __init__(
        self,
        engine: Engine,
        frontend: Frontend,
        options: ServerOptions,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._frontend = frontend
        self._tokenizer = frontend.tokenizer
        self._options = options
        self._metrics = metrics
        self._limits = ModelLimits(
            names=frozenset({options.model, *options.aliases}),
            max_context=engine.max_context,
            vocab_size=engine.vocab_size,
        )
        # A prompt that is somewhat too long is still counted for the error text.
        self._longest_counted = 2 * engine.max_context
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="hpc-text")
        self._told: set[tuple[str, str]] = set()

    def close(self) -> None:
        """End the text thread; work still queued on it is dropped."""
        self._text_thread.shutdown(wait=False, cancel_futures=True)

    async def chat(self, request: HttpRequest) -> ASGIApp:
        """POST /v1/chat/completions."""
        return await self._handle(request, self._read_chat, "chatcmpl", ChatAnswer)

    async def completions(self, request: HttpRequest) -> ASGIApp:
        """POST /v1/completions."""
        return await self._handle(request, self._read_completion, "cmpl", CompletionAnswer)

    async def _handle(
        self,
        http: HttpRequest,
        read: _Read,
        prefix: str,
        answer: Callable[[Envelope], Answer],
    ) -> ASGIApp:
        request_id = f"{prefix}-{secrets.token_hex(12)}"
        headers = {"x-request-id": request_id}
        try:
            data = await self._body(http)
            salt = key_salt(self._options, http.headers)
            loop = asyncio.get_running_loop()
            asked, prepared = await loop.run_in_executor(self._text_thread, self._prepare, data, read, salt)
            self._note_unknown(http, asked.common.unknown)
            envelope = Envelope(
                request_id,
                int(time.time()),
                self._options.model,
                asked.common,
                prepared.prompt.tokens,
                self._tokenizer,
            )
            return await self._run(http, prepared, envelope, answer(envelope), headers)
        except RequestError as error:
            self._metrics.failed(error.code or error.kind)
            return error_response(error, headers)
        except ClientGoneError:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:  # a fault of ours must not cost the client its connection
            return error_response(self._internal(error), headers)

    async def _run(
        self,
        http: HttpRequest,
        prepared: Prepared,
        envelope: Envelope,
        answer: Answer,
        headers: Mapping[str, str],
    ) -> ASGIApp:
        common = envelope.common
        request = self._request(prepared, common)
        text = self._text(prepared, common)
        stream = EventStream(asyncio.get_running_loop())
        worker_text = bool(common.stops)
        generation = Generation(self._engine, stream, request, text, envelope, text_on_worker=worker_text)
        pieces = generation.pieces(self._options.ping_s)
        generation.submit()
        handed_over = False
        try:
            if common.stream:
                # A request that fails at once gets a status of its own, not a stream that starts with 200.
                first = await or_disconnect(anext(pieces, None), http.receive)
                run = _Run(generation, prepared, text, answer, pieces, first)
                handed_over = True
                return EventStreamResponse(self._events(run), headers)
            got = await or_disconnect(_all(pieces), http.receive)
            self._record(prepared, generation, text)
            return _json(answer.whole(got, _reason(generation)), headers)
        finally:
            if not handed_over:
                generation.cancel()

    async def _events(self, run: _Run) -> AsyncGenerator[bytes, None]:
        """The stream's bytes. What goes wrong from here on is its last event."""
        try:
            yield b"".join(map(sse, run.answer.opening()))
            piece = run.first
            while True:
                if piece is None:
                    yield PING
                elif chunks := run.answer.chunks(piece):
                    yield b"".join(map(sse, chunks))
                try:
                    piece = await anext(run.pieces)
                except StopAsyncIteration:
                    break
            self._record(run.prepared, run.generation, run.text)
            yield b"".join(map(sse, run.answer.closing(_reason(run.generation)))) + DONE
        except RequestError as error:
            self._metrics.failed(error.code or error.kind)
            yield sse(error.body())
        except Exception as error:  # the stream must not end without a last event
            yield sse(self._internal(error).body())
        finally:
            run.generation.cancel()

    async def _body(self, http: HttpRequest) -> bytes:
        """The body. Raises RequestError when it is too long or too slow, ClientGoneError when cut off."""
        bound = self._options.max_body_bytes
        too_large = RequestError(
            413,
            f"the body is longer than {bound} bytes",
            kind="invalid_request_error",
            code="request_too_large",
        )
        declared = http.headers.get("content-length", "0")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > bound:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                while True:
                    message = await http.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    size += len(part)
                    if size > bound:
                        raise too_large
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            limit = self._options.body_timeout_s
            message_text = f"the body took longer than {limit:g} s"
            raise RequestError(408, message_text, kind="invalid_request_error", code="timeout") from error

    def _prepare(self, data: bytes, read: _Read, key: bytes) -> tuple[_Asked, Prepared]:
        """Parse, check and render; on the text thread."""
        asked = read(parse_body(data))
        cacheable = asked.common.cacheable and self._options.prefix_reuse
        try:
            prepared = asked.render(key + asked.common.cache_salt, cacheable)
        except PromptTooLongError as error:
            raise self._too_long(f"more than {error.bound}", error.param) from error
        except FrontendError as error:
            raise not_valid(error.param, error.message) from error
        return asked, prepared

    def _too_long(self, tokens: str, param: str) -> RequestError:
        context = self._limits.max_context
        return RequestError(
            400,
            f"the prompt has {tokens} tokens; the context of {context} tokens must hold it and one more",
            kind="invalid_request_error",
            param=param,
            code="context_length_exceeded",
        )

    def _read_chat(self, body: Mapping[str, object]) -> _Asked:
        asked = read_chat(body, self._limits, strict=self._options.strict)

        def render(salt: bytes, cacheable: bool) -> Prepared:
            return self._frontend.chat(
                asked.messages,
                asked.tools,
                kwargs=asked.kwargs,
                cache_salt=salt,
                cacheable=cacheable,
                max_tokens=self._longest_counted,
            )

        return _Asked(asked.common, render)

    def _read_completion(self, body: Mapping[str, object]) -> _Asked:
        asked = read_completion(body, self._limits, strict=self._options.strict)

        def render(salt: bytes, cacheable: bool) -> Prepared:
            return self._frontend.completion(
                asked.prompt, cache_salt=salt, cacheable=cacheable, max_tokens=self._longest_counted
            )

        return _Asked(asked.common, render)

    def _request(self, prepared: Prepared, common: Common) -> Request:
        prompt, context = prepared.prompt, self._limits.max_context
        n = len(prompt.tokens)
        if n < 1:
            raise not_valid("prompt", "is empty; it must have at least one token")
        left = context - n
        if left < 1:
            raise self._too_long(str(n), "messages" if prepared.chat else "prompt")
        if common.max_new is not None and common.max_new > left:
            self._metrics.adjusted("max_tokens_clamped")
        return Request(
            prompt=prompt,
            max_new=left if common.max_new is None else min(common.max_new, left),
            sampling=common.sampling,
            stop_tokens=self._tokenizer.eos_ids,
            ignore_eos=common.ignore_eos,
        )

    def _text(self, prepared: Prepared, common: Common) -> OutputStream:
        try:
            return self._frontend.output(prepared, common.stops)
        except FrontendError as error:
            raise not_valid(error.param, error.message) from error

    def _record(self, prepared: Prepared, generation: Generation, text: OutputStream) -> None:
        """Keep a chat reply's ids (D21). Queued before its last chunk goes out: the next turn finds them."""
        if prepared.echo is None:
            return
        ids = generation.ids_array()
        done = self._text_thread.submit(self._frontend.record_reply, prepared, ids, text.parts())
        done.add_done_callback(self._recorded)

    def _internal(self, error: Exception) -> RequestError:
        """A fault of ours: the log has it, the client gets no internals."""
        _log.error("a request handler failed", exc_info=error)
        self._metrics.failed("internal_error")
        text = "the server failed on this request"
        return RequestError(500, text, kind="server_error", code="internal_error")

    def _recorded(self, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._metrics.adjusted("reply_not_recorded")
            _log.error("a reply could not be recorded", exc_info=error)

    def _note_unknown(self, http: HttpRequest, unknown: tuple[str, ...]) -> None:
        """Count unknown fields, and log each once a client (D11)."""
        client = http.client.host if http.client is not None else "?"
        for name in unknown:
            self._metrics.adjusted("unknown_field")
            if (client, name) not in self._told and len(self._told) < _MAX_KNOWN_CLIENTS:
                self._told.add((client, name))
                _log.warning("client %s sends %r, which is not known here and is ignored", client, name)


async def _all(pieces: AsyncIterator[Piece | None]) -> list[Piece]:
    return [piece async for piece in pieces if piece is not None]


def _reason(generation: Generation) -> FinishReason:
    if generation.reason is None:
        raise RuntimeError("the request is not over")
    return generation.reason


def _json(value: Mapping[str, object], headers: Mapping[str, str]) -> Response:
    return Response(orjson.dumps(value), headers=dict(headers), media_type="application/json")

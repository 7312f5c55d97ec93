"""A streaming chat client that notes when tokens arrive. One connection, kept open like a real client's."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import attrs
import httpx

from hpc_cli.bench.workload import Message
from hpc_cli.errors import CommandError

__all__ = ["ChatClient", "Reply"]

SECONDS_TO_ANSWER = 600.0  # a long cold prompt of a large model on a CPU


@attrs.frozen(eq=False)
class Reply:
    """One streamed reply as the client saw it.

    ttft: seconds from sending the request to the first generated token.
    decode_tok_s: tokens a second from the second token to the last; None with fewer than three.
    cached_tokens: as the server reports them; None if it does not.
    prompt_ids, reply_ids: token ids, if the server gave them (`return_token_ids`), else None.
    message: what to send back to continue the conversation.
    """

    ttft: float
    decode_tok_s: float | None
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    prompt_ids: tuple[int, ...] | None
    reply_ids: tuple[int, ...] | None
    message: Message


@attrs.define
class _Stream:
    """What the events of one reply add up to."""

    arrivals: list[tuple[float, int]] = attrs.Factory(list)  # (seconds, tokens), one an event with tokens
    content: str = ""
    reasoning: str = ""
    prompt_ids: list[int] | None = None
    reply_ids: list[int] | None = None
    usage: Mapping[str, Any] | None = None

    def take(self, event: Mapping[str, Any], at: float) -> None:
        if "error" in event:
            raise CommandError(f"the server broke the reply off: {json.dumps(event['error'])}")
        if event.get("usage"):
            self.usage = event["usage"]
        if event.get("prompt_token_ids"):
            self.prompt_ids = event["prompt_token_ids"]
        for choice in event.get("choices") or ():
            self._take_choice(choice, at)

    def _take_choice(self, choice: Mapping[str, Any], at: float) -> None:
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        ids = choice.get("token_ids") or []
        self.content += content
        self.reasoning += reasoning
        if choice.get("prompt_token_ids"):
            self.prompt_ids = choice["prompt_token_ids"]
        if ids:
            self.reply_ids = [*(self.reply_ids or []), *ids]
        if ids or content or reasoning:
            self.arrivals.append((at, len(ids) or 1))

    def decode_rate(self, completion_tokens: int) -> float | None:
        """Tokens a second after the second one. Without ids, an event is taken to hold one token."""
        came = 0
        for at, tokens in self.arrivals:
            came += tokens
            if came >= 2:
                seconds, left = self.arrivals[-1][0] - at, completion_tokens - came
                return left / seconds if left > 0 and seconds > 0 else None
        return None


@attrs.define
class ChatClient:
    """Talks to one OpenAI-compatible server. Use as a context manager; requests go one after another."""

    url: str
    model: str | None = None
    _http: httpx.Client = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=None)
        timeout = httpx.Timeout(SECONDS_TO_ANSWER, connect=10.0)
        self._http = httpx.Client(base_url=self.url, limits=limits, timeout=timeout, trust_env=False)

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def served_model(self) -> str:
        """The name of the model under test: as given, else the first that the server lists."""
        if self.model is None:
            with _naming(self.url):
                answer = self._http.get("/v1/models").raise_for_status().json()
            self.model = str(answer["data"][0]["id"])
        return self.model

    def chat(self, messages: Sequence[Message], *, max_tokens: int, seed: int) -> Reply:
        """Stream one reply of exactly `max_tokens` tokens.

        Raises CommandError if the server refuses, breaks off, or cannot be reached.
        """
        body = {
            "model": self.served_model(),
            "messages": list(messages),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        stream = _Stream()
        with _naming(self.url):
            sent = time.perf_counter()
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise CommandError(f"the server answered {response.status_code}: {response.text[:500]}")
                for event in _events(response):
                    stream.take(event, time.perf_counter() - sent)
        return _reply(stream)


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Let errors of the connection say which server they are about."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, json.JSONDecodeError) as error:
        raise CommandError(f"server {url}: {str(error) or type(error).__name__}") from error


def _events(response: httpx.Response) -> Iterator[Mapping[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                continue  # read to the end of the body, so that the connection is kept
            yield json.loads(data)


def _reply(stream: _Stream) -> Reply:
    if stream.usage is None:
        raise CommandError("the server sent no usage, although stream_options.include_usage asked for it")
    if not stream.arrivals:
        raise CommandError("the server's reply had no token")
    completion = int(stream.usage["completion_tokens"])
    details = stream.usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    message = {"role": "assistant", "content": stream.content}
    if stream.reasoning:
        message["reasoning_content"] = stream.reasoning
    return Reply(
        ttft=stream.arrivals[0][0],
        decode_tok_s=stream.decode_rate(completion),
        prompt_tokens=int(stream.usage["prompt_tokens"]),
        cached_tokens=None if cached is None else int(cached),
        completion_tokens=completion,
        prompt_ids=tuple(stream.prompt_ids) if stream.prompt_ids else None,
        reply_ids=tuple(stream.reply_ids) if stream.reply_ids else None,
        message=message,
    )

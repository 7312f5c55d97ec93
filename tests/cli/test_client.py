"""The bench's client reads a stream as a person would see it and names what is wrong with a server."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from hpc_cli.bench.client import ChatClient, Reply, _Stream
from hpc_cli.errors import CommandError
from tests.cli.fake_server import Answer, bare_usage, fake_server, streamed

MESSAGES = [{"role": "user", "content": "hello"}]


def ask(answer: Answer, bodies: list[dict[str, Any]] | None = None) -> Reply:
    with fake_server(answer, [] if bodies is None else bodies, []) as url, ChatClient(url) as client:
        return client.chat(MESSAGES, max_tokens=4, seed=7)


def test_reads_text_ids_and_usage() -> None:
    """Content, reasoning, token ids, cached tokens and the message to echo all come from the stream."""
    reply = ask(lambda body: streamed(4, bare_usage(10, 4, cached=9), prompt_token_ids=[5, 6]))
    assert reply.message == {"role": "assistant", "content": "1 2 3 ", "reasoning_content": "0 "}
    assert (reply.prompt_ids, reply.reply_ids) == ((5, 6), (0, 1, 2, 3))
    assert (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens) == (10, 9, 4)
    assert reply.ttft > 0


def test_a_server_without_extensions_is_read_too() -> None:
    """No token ids and no cached tokens are told apart from zero of them."""
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": "a"}}]}]
    events.append({"choices": [], "usage": bare_usage(3, 1)})
    reply = ask(lambda body: events)
    assert (reply.prompt_ids, reply.reply_ids, reply.cached_tokens) == (None, None, None)
    assert "reasoning_content" not in reply.message


def test_asks_for_exactly_the_tokens() -> None:
    """The request fixes the reply's length and asks for usage and ids, under the name that is served."""
    bodies: list[dict[str, Any]] = []
    ask(lambda body: streamed(4, bare_usage(1, 4)), bodies)
    assert bodies[0]["model"] == "fake-model"
    assert bodies[0]["max_tokens"] == 4
    assert bodies[0]["ignore_eos"] is True
    assert bodies[0]["return_token_ids"] is True
    assert bodies[0]["stream_options"] == {"include_usage": True}
    assert bodies[0]["messages"] == MESSAGES


def test_keeps_its_connection() -> None:
    """All requests arrive from one peer port."""
    peers: list[Any] = []
    with fake_server(lambda body: streamed(2, bare_usage(1, 2)), [], peers) as url, ChatClient(url) as client:
        for _ in range(3):
            client.chat(MESSAGES, max_tokens=2, seed=0)
    assert len(peers) == 3
    assert len(set(peers)) == 1


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ((400, '{"error": {"message": "max_tokens is -1"}}'), "answered 400.*max_tokens is -1"),
        ([{"error": {"message": "shutting down"}}], "broke the reply off.*shutting down"),
        ([{"choices": [{"delta": {"content": "a"}}]}], "no usage"),
        ([{"choices": [], "usage": bare_usage(1, 0)}], "no token"),
    ],
)
def test_faults_of_a_server_are_named(given: Any, complaint: str) -> None:
    """A refusal, an error inside a stream, and a reply without usage or tokens each say so."""
    with pytest.raises(CommandError, match=complaint):
        ask(lambda body: given)


def test_no_server_is_named_with_its_url() -> None:
    """A port where nothing listens gives one line with the URL."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with ChatClient(url) as client, pytest.raises(CommandError, match=url):
            client.chat(MESSAGES, max_tokens=1, seed=0)


def stream_of(*arrivals: tuple[float, int]) -> _Stream:
    return _Stream(arrivals=list(arrivals))


def test_rate_counts_from_the_second_token() -> None:
    """The first token's wait and the way to the second are not part of decoding speed."""
    assert stream_of((5.0, 1), (6.0, 1), (6.1, 1), (6.2, 1)).decode_rate(4) == pytest.approx(2 / 0.2)


def test_rate_of_tokens_that_come_together() -> None:
    """When the second token comes within a larger event, only tokens after that event count."""
    assert stream_of((1.0, 1), (2.0, 3), (3.0, 4)).decode_rate(8) == pytest.approx(4.0)


@pytest.mark.parametrize("arrivals", [(), ((1.0, 1),), ((1.0, 1), (2.0, 1)), ((1.0, 3),)])
def test_no_rate_without_a_span(arrivals: tuple[tuple[float, int], ...]) -> None:
    """Fewer than three tokens, or all at once, have no speed."""
    assert stream_of(*arrivals).decode_rate(sum(tokens for _, tokens in arrivals)) is None

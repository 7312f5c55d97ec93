"""Clients that vanish: at every stage all that they held comes back (field reports 46, 49)."""

from __future__ import annotations

import json
import socket
import time

import pytest

from hpc_server.options import EngineOptions, ServerOptions
from tests.server.served import MODEL, Served, geometry, plain_replies, served, small, until

SLOW = small(geometry(lanes=1), prefill_tokens_per_s=2000.0, decode_steps_per_s=100.0)
"""A 64-token chunk takes 32 ms, a token 10 ms; one request runs at a time."""


def send(running: Served, *, tokens: int, stream: bool, max_tokens: int = 500) -> socket.socket:
    """Send a request on a socket of its own and read nothing."""
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": [300 + i % 97 for i in range(tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    client = socket.create_connection((host, int(port)))
    client.sendall(head.encode() + body)
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
def test_a_closed_connection_frees_its_lane(stage: str, stream: bool) -> None:
    """Within a chunk the lane is free and the next request starts."""
    with served(plain_replies(), SLOW) as running:
        ahead = send(running, tokens=16, stream=True) if stage == "queued" else None
        if ahead is not None:
            until(lambda: running.index().lanes == 1)
        size = 1500 if stage == "prefill" else 32
        client = send(running, tokens=size, stream=stream)
        wanted = 2 if stage == "queued" else 1
        until(lambda: running.engine.open == wanted)
        if stage != "queued":
            until(lambda: running.index().lanes == 1)
        if stage == "decode":
            until(lambda: running.program.stats().counters["decode_steps"] > 3)
        client.close()
        began = time.monotonic()
        until(lambda: running.engine.open == wanted - 1)
        assert time.monotonic() - began < 2.0
        if ahead is not None:
            ahead.close()
        running.idle()
        outcomes = [report.outcome for report in running.reports]
        assert outcomes == ["cancelled"] * wanted


def test_a_slow_reader_holds_nobody_up() -> None:
    """A client that reads nothing of its stream does not delay another one's reply."""
    with served(plain_replies(), small(decode_steps_per_s=2000.0)) as running:
        lazy = send(running, tokens=16, stream=True, max_tokens=600)
        until(lambda: running.index().lanes == 1)
        answer = running.complete(max_tokens=20, ignore_eos=True)
        assert answer.status_code == 200
        until(lambda: len(running.reports) == 2)
        lazy.close()
        running.idle()


def test_a_body_cut_off_reaches_nobody() -> None:
    """A client that leaves in the middle of its body never becomes a request."""
    with served() as running:
        host, port = running.url.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
        client.close()
        assert running.complete(max_tokens=2).status_code == 200
        running.idle()
        assert len(running.reports) == 1


def test_a_body_that_never_comes_times_out() -> None:
    """A client that promises a body and sends none gets 408, not a connection for ever."""
    with served(server=ServerOptions(model=MODEL, body_timeout_s=0.1)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
            assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_too_many_waiting_requests_are_refused() -> None:
    """Beyond max_queue a request gets 429 at once; those in the queue are served."""
    with served(plain_replies(), SLOW, engine=EngineOptions(prefill_chunk=64, max_queue=2)) as running:
        first = send(running, tokens=16, stream=True)
        until(lambda: running.index().lanes == 1)
        waiting = [send(running, tokens=16, stream=True, max_tokens=2) for _ in range(2)]
        until(lambda: running.engine.open == 3)
        answer = running.complete(max_tokens=2)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "server_overloaded"
        assert "max_queue is 2" in answer.json()["error"]["message"]
        first.close()
        until(lambda: len(running.reports) == 3)
        for client in waiting:
            client.close()
        running.idle()
        assert [report.outcome for report in running.reports] == ["cancelled", "length", "length"]


def test_silence_is_filled_with_comments() -> None:
    """While a prompt is prefilled the stream gets a comment now and then (field report 43)."""
    server = ServerOptions(model=MODEL, ping_s=0.05)
    with served(plain_replies(2), SLOW, server=server) as running:
        answer = running.complete([320] * 900, stream=True, max_tokens=2)
        assert answer.status_code == 200
        assert answer.text.count(": ping\n\n") >= 3
        assert answer.text.rstrip().endswith("[DONE]")

"""Raw bytes on a connection: what comes before a body is bounded, and what is no HTTP is told so in JSON."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from hpc_server.connection import Connection
from hpc_server.options import ServerOptions
from tests.server.served import MODEL, Served, plain_replies, served, small

HOST = b"Host: 127.0.0.1\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
HEAD_BYTES = 4096
HEAD_S = 0.4


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    options = ServerOptions(model=MODEL, allowed_hosts=ServerOptions.loopback_hosts())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "max_head_bytes", HEAD_BYTES)
        patch.setattr(Connection, "head_timeout_s", HEAD_S)
        with served(plain_replies(), small(decode_steps_per_s=40.0), server=options) as running:
            yield running


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def until_closed(connection: socket.socket) -> bytes:
    got = b""
    try:
        while part := connection.recv(65536):
            got += part
    except ConnectionResetError:  # it closed with bytes of ours unread; its answer may have come before
        pass
    return got


def exchanged(server: Served, *parts: bytes) -> bytes:
    """What comes back until the server closes."""
    with connect(server) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return until_closed(connection)


def refusal(answer: bytes) -> tuple[int, dict[str, object]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


def completion(**fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 2, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(body)
    return head + body


@pytest.mark.parametrize(
    "head",
    [
        GET + b"X: " + b"a" * HEAD_BYTES + b"\r\n\r\n",
        GET + b"X: a\r\n" * (HEAD_BYTES // 5) + b"\r\n",
        b"GET /" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        GET + b"X: " + b"a" * (2 * HEAD_BYTES),
        GET + b"X" * (2 * HEAD_BYTES),
        b"\r\n" * HEAD_BYTES,
        completion() + GET + b"X: " + b"a" * HEAD_BYTES + b"\r\n\r\n",
    ],
    ids=["one header", "many headers", "URL", "value without end", "name without end", "blank", "second"],
)
def test_a_long_head_is_refused(server: Served, head: bytes) -> None:
    """Whatever makes a head long, complete or not: the connection is closed, with 431 if one can answer."""
    answer = exchanged(server, head)
    if b"/v1/completions" not in head:
        status, error = refusal(answer)
        assert (status, error["code"]) == (431, "headers_too_large")
        assert str(HEAD_BYTES) in str(error["message"])
    assert server.client.get("/health").status_code == 200


def test_a_head_that_never_ends_is_not_kept(server: Served) -> None:
    """A header of many megabytes is cut off after the first ones."""
    with connect(server) as connection:
        connection.sendall(GET + b"X: ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(b"a" * (64 << 20))


@pytest.mark.parametrize("split", [1, 64, 70_000])
def test_bodies_are_no_part_of_the_head(server: Served, split: int) -> None:
    """A body far longer than a head may be is read, whole with its head or in parts, again and again."""
    request = completion(user="x" * (20 * HEAD_BYTES))
    with connect(server) as connection:
        for _ in range(2):
            head_end = request.index(b"\r\n\r\n") + 4
            cut = head_end + split
            connection.sendall(request[:cut])
            connection.sendall(request[cut:])
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"GET", GET, b"\r\n"])
def test_a_head_that_does_not_come_is_waited_for_a_while(server: Served, sent: bytes) -> None:
    """A silent or slow client loses its connection; one that began a head is told why."""
    answer = exchanged(server, sent)
    if sent:
        status, error = refusal(answer)
        assert (status, error["code"]) == (408, "timeout")
    else:
        assert answer == b""


def test_bytes_behind_a_request_do_not_cost_its_answer(server: Served) -> None:
    """A stray line end after a body, as old clients send, does not end a reply that takes a while."""
    tokens = int(3 * HEAD_S * 40)
    with connect(server) as connection:
        connection.sendall(completion(max_tokens=tokens, ignore_eos=True))
        connection.sendall(b"\r\n")
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"completion_tokens":%d' % tokens in answer


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 not http\r\n\r\n",
        b"FOO / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
        GET + b"X: a\x00b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: -5\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_told_so_in_json(server: Served, sent: bytes) -> None:
    """The parser's refusals have the shape of all others."""
    status, error = refusal(exchanged(server, sent))
    assert (status, error["code"]) == (400, "invalid_http")


def test_pipelined_requests_are_answered_in_order(server: Served) -> None:
    """Requests sent at once on one connection each get their answer."""
    last = GET + b"Connection: close\r\n\r\n"
    answer = exchanged(server, completion(max_tokens=1) + completion(max_tokens=2) + last)
    counts = [answer.find(b'"completion_tokens":%d' % n) for n in (1, 2)]
    assert -1 < counts[0] < counts[1] < answer.rfind(b'{"status":"ok"}')


@pytest.mark.parametrize("hosts", [b"", HOST + b"Host: evil.example\r\n", b"Host: evil.example\r\n" + HOST])
def test_a_request_names_one_host(server: Served, hosts: bytes) -> None:
    """None, or two of which one is right, is as good as a wrong one."""
    answer = exchanged(server, b"GET /health HTTP/1.1\r\n" + hosts + b"Connection: close\r\n\r\n")
    status, error = refusal(answer)
    assert (status, error["code"]) == (403, "forbidden_host")


def test_there_is_no_way_around_by_upgrading(server: Served) -> None:
    """A WebSocket handshake is answered as the plain request that it also is."""
    upgrade = (
        b"GET /v1/chat/completions HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    with connect(server) as connection:
        connection.sendall(upgrade)
        assert connection.recv(65536).startswith(b"HTTP/1.1 405")


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/chat/completions", "/v1/completions"])
def test_a_wrong_method_is_told_the_right_ones(server: Served, path: str) -> None:
    """405 comes with Allow, as HTTP demands."""
    answer = server.client.request("PUT", path)
    assert answer.status_code == 405
    assert {"GET", "POST"} & set(answer.headers["allow"].replace(" ", "").split(","))

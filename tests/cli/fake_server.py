"""A server that speaks just enough of the protocol, with replies that a test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], "list[dict[str, Any]] | tuple[int, str]"]
"""From a request body to the events of the stream, or to a status and a body that refuse it."""


@contextmanager
def fake_server(answer: Answer, bodies: list[dict[str, Any]], peers: list[Any]) -> Iterator[str]:
    """The URL of a server that streams what `answer` gives and notes each request's body and peer."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "fake-model"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            peers.append(self.client_address)
            given = answer(body)
            if isinstance(given, tuple):
                self._send(*given)
                return
            self._send(200, "".join(f"data: {json.dumps(event)}\n\n" for event in given) + "data: [DONE]\n\n")

        def _send(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def streamed(tokens: int, usage: dict[str, Any], **first: Any) -> list[dict[str, Any]]:
    """Events of a reply of `tokens` tokens "0 1 2 …", the first one reasoning, and the usage last."""
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}], **first}]
    for token in range(tokens):
        field = "reasoning_content" if token == 0 else "content"
        events.append({"choices": [{"delta": {field: f"{token} "}, "token_ids": [token]}]})
    return [*events, {"choices": [], "usage": usage}]


def bare_usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage

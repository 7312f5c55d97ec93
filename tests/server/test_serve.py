"""The server as a process: ports, signals, addresses that need a key."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from hpc_server.engine import Engine, EngineState
from hpc_server.options import ServerOptions
from hpc_server.scripted import ScriptedProgram
from hpc_server.serve import ListenError, bind, secured, serve
from tests.server import texts
from tests.server.served import MODEL, plain_replies, small, sse_events

SCRIPT = """
import logging, sys
from hpc_server.options import ServerOptions
from hpc_server.scripted import ScriptedProgram
from hpc_server.serve import ListenError, serve
from tests.server import texts
from tests.server.served import plain_replies, small

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
tokenizer = texts.tokenizer()
options = small(decode_steps_per_s=100.0)
program = ScriptedProgram(plain_replies(), vocab_size=tokenizer.vocab_size, options=options)
try:
    ok = serve(program, texts.frontend(), ServerOptions(model="tiny"), port=int(sys.argv[1]),
               on_started=lambda url: print(url, flush=True))
except ListenError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
sys.exit(0 if ok else 4)
"""


def start(port: int = 0) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
    )


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_streams_with_an_error_and_exits_in_order(sig: signal.Signals) -> None:
    """The stream's last event is an error, the process exits with 0 within seconds, the log has its line."""
    process = start()
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    body = {"model": MODEL, "prompt": "secret hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
    seen = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response:
        for i, part in enumerate(response.iter_text()):
            seen += part
            if i == 3:
                process.send_signal(sig)
                began = time.monotonic()
    _, log = process.communicate(timeout=10)
    assert process.returncode == 0, log
    assert time.monotonic() - began < 5
    assert sse_events(seen)[-1]["error"]["code"] == "shutting_down"  # type: ignore[index]
    assert "Traceback" not in log
    assert "prompt 6" in log or "prompt " in log
    assert "secret" not in log


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_wait_for_clients(second: signal.Signals) -> None:
    """However often Ctrl+C is pressed, it ends with 0 and without a traceback, at once."""
    process = start()
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response:
        assert next(response.iter_text())
        began = time.monotonic()
        for sig in (signal.SIGINT, second, second):
            process.send_signal(sig)
            time.sleep(0.05)
        _, log = process.communicate(timeout=10)
    assert time.monotonic() - began < 5
    assert process.returncode == 0, log
    assert "Traceback" not in log


def test_a_port_in_use_is_named_and_the_exit_is_not_zero() -> None:
    """The message names host, port and cause."""
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        process = start(port)
        _, log = process.communicate(timeout=20)
    assert process.returncode == 3
    assert f"cannot listen on 127.0.0.1 port {port}" in log
    assert "in use" in log


@pytest.mark.parametrize(
    ("host", "port", "words"), [("127.0.0.1", 70000, "70000"), ("no such host", 0, "resolved")]
)
def test_addresses_that_cannot_be(host: str, port: int, words: str) -> None:
    """A bad port or host is a ListenError, not a traceback."""
    with pytest.raises(ListenError, match=words):
        bind(host, port)


def test_loopback_needs_no_key_and_knows_its_names() -> None:
    """On loopback only its own names are answered to (D27)."""
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        options = secured(ServerOptions(model=MODEL), host)
        assert options.allowed_hosts == ServerOptions.loopback_hosts()


def test_other_addresses_need_a_key_or_the_explicit_flag() -> None:
    """Binding elsewhere without a key is refused in one line (D27)."""
    for host in ("0.0.0.0", "192.0.2.1", "::", "example.org"):
        with pytest.raises(ListenError, match="allow-unauthenticated"):
            secured(ServerOptions(model=MODEL), host)
        assert secured(ServerOptions(model=MODEL), host, allow_unauthenticated=True).allowed_hosts is None
        assert secured(ServerOptions(model=MODEL, api_keys=("k",)), host).api_keys == ("k",)


def test_a_free_port_is_found() -> None:
    """Port 0 gives a listening socket with a real port."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0
        with socket.create_connection(listener.getsockname()):
            pass


def test_what_fails_once_started_ends_the_server_in_order() -> None:
    """An error of the caller's own start report closes the program and reaches the caller."""

    def fail(_url: str) -> None:
        raise RuntimeError("no place for the report")

    tokenizer = texts.tokenizer()
    program = ScriptedProgram(plain_replies(), vocab_size=tokenizer.vocab_size, options=small())
    engines: list[Engine] = []
    with pytest.raises(RuntimeError, match="no place"):
        serve(
            program,
            texts.frontend(),
            ServerOptions(model=MODEL),
            port=0,
            on_started=fail,
            on_engine=engines.append,
        )
    assert engines[0].state is EngineState.STOPPING
    assert not engines[0].alive

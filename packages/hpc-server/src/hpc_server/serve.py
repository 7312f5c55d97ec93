"""Running the server in this process: bind, serve until a signal, end in order within seconds."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import attrs
import uvicorn
from starlette.types import ASGIApp

from hpc_server.app import create_app
from hpc_server.connection import Connection
from hpc_server.contracts import Program
from hpc_server.engine import Engine, EngineState
from hpc_server.events import Report
from hpc_server.frontend import Frontend
from hpc_server.metrics import Metrics
from hpc_server.options import EngineOptions, ServerOptions
from hpc_server.request_log import RequestLog

__all__ = ["ListenError", "bind", "run_app", "secured", "serve"]

_log = logging.getLogger(__name__)
_DRAIN_S = 2
"""How long clients get to take their last event at shutdown."""
_JOIN_S = 3.0
"""How long the worker gets to close the program after that."""


class ListenError(Exception):
    """The address cannot be listened on, or must not be without a key. The text says which and why."""


def is_loopback(host: str) -> bool:
    """Does this address reach only this machine?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def secured(options: ServerOptions, host: str, *, allow_unauthenticated: bool = False) -> ServerOptions:
    """Options with the checks that this address calls for (D27).

    On loopback only loopback names are answered to, against web pages that rebind their name. Elsewhere a
    key is needed. Raises ListenError if there is none and allow_unauthenticated is not set.
    """
    if is_loopback(host):
        if options.allowed_hosts is None:
            return attrs.evolve(options, allowed_hosts=ServerOptions.loopback_hosts())
    elif not options.api_keys and not allow_unauthenticated:
        raise ListenError(f"{host} is reachable from elsewhere: give an API key, or --allow-unauthenticated")
    return options


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ListenError, which names the address and the cause."""
    if not 0 <= port <= 65535:
        raise ListenError(f"port is {port}; it must be in [0, 65535]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ListenError(f"host {host!r} cannot be resolved: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name != "nt":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening at once makes a port that another server holds an error here, not later.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def serve(
    program: Program,
    frontend: Frontend,
    options: ServerOptions,
    engine_options: EngineOptions | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_unauthenticated: bool = False,
    listener: socket.socket | None = None,
    on_started: Callable[[str], None] | None = None,
    on_engine: Callable[[Engine], None] | None = None,
) -> bool:
    """Serve until SIGINT or SIGTERM, or until the engine is told to stop; then close the program.

    listener: a socket from `bind`, made before the model was loaded; else one is bound here.
    on_started: gets the URL once connections are accepted; what it raises ends the server and is raised.
    on_engine: gets the engine before that.
    True if everything ended in order, False if the worker did not come back in time.
    Raises ListenError.
    """
    checked = secured(options, host, allow_unauthenticated=allow_unauthenticated)
    sock = listener if listener is not None else bind(host, port)
    metrics, log = Metrics(), RequestLog()

    def report(record: Report) -> None:
        metrics.finished(record)
        log(record)

    engine = Engine(program, engine_options, report=report)
    app = create_app(engine, frontend, checked, metrics)
    if on_engine is not None:
        on_engine(engine)
    engine.start()
    try:
        run_app(app, engine, sock, on_started=on_started)
    finally:
        stopped = engine.stop(_JOIN_S)
        if not stopped:
            _log.error("the engine did not stop within %.0f s", _JOIN_S)
    return stopped


def run_app(
    app: ASGIApp,
    engine: Engine,
    listener: socket.socket,
    *,
    on_started: Callable[[str], None] | None = None,
) -> None:
    """Run an app on a bound socket until a signal comes or the engine is stopping.

    What on_started raises ends the server in order, then is raised again.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_DRAIN_S,
        timeout_keep_alive=30,
        http=Connection,
        ws="none",  # an upgrade would pass by the guard
    )
    server = _Server(config, engine, on_started, _url(listener))
    server.run(sockets=[listener])
    if server.fault is not None:
        raise server.fault


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's server, which tells the engine before it waits for streams to end."""

    def __init__(
        self, config: uvicorn.Config, engine: Engine, on_started: Callable[[str], None] | None, url: str
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._on_started = on_started
        self._url = url
        self.fault: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self._on_started is not None:
            try:
                self._on_started(self._url)
            except Exception as error:  # raised here, it would skip the shutdown
                self.fault = error

    async def on_tick(self, counter: int) -> bool:
        over = self.fault is not None or self._engine.state is EngineState.STOPPING
        return await super().on_tick(counter) or over

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.begin_stop()
        await super().shutdown(sockets=sockets)
        if self.force_exit:  # a second Ctrl+C: no more waiting for clients, but an end in order all the same
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without raising them again afterwards: an orderly end is not a failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

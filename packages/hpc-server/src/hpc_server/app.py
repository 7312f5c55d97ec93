"""The ASGI app: routes, health, models, metrics, and errors in the protocol's own shape."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from hpc_server.endpoints import Endpoints
from hpc_server.engine import Engine
from hpc_server.frontend import Frontend
from hpc_server.guard import Guard, error_response
from hpc_server.metrics import Metrics, Snapshot
from hpc_server.options import ServerOptions
from hpc_server.protocols.errors import RequestError

__all__ = ["create_app"]

_log = logging.getLogger(__name__)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    engine: Engine,
    frontend: Frontend,
    options: ServerOptions,
    metrics: Metrics | None = None,
) -> Starlette:
    """The app for a started engine, which it neither starts nor stops.

    metrics: the one whose `finished` the engine reports to; a new one counts no finished requests.
    """
    counts = metrics if metrics is not None else Metrics()
    endpoints = Endpoints(engine, frontend, options, counts)
    about = _About(engine, frontend, options, counts)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        endpoints.close()

    return Starlette(
        routes=[
            Route("/", about.root, methods=["GET"]),
            Route("/health", about.health, methods=["GET"]),
            Route("/metrics", about.metrics, methods=["GET"]),
            Route("/v1/models", about.models, methods=["GET"]),
            Route("/v1/models/{id:path}", about.model, methods=["GET"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, options=options)],
        exception_handlers={HTTPException: _http_error, Exception: _server_error},
        lifespan=lifespan,
    )


class _About:
    """The routes that say something about the server."""

    def __init__(self, engine: Engine, frontend: Frontend, options: ServerOptions, metrics: Metrics) -> None:
        self._engine = engine
        self._frontend = frontend
        self._options = options
        self._metrics = metrics

    async def root(self, _request: HttpRequest) -> Response:
        """GET and HEAD /: clients probe it."""
        return _json({"status": "ok", "model": self._options.model})

    async def health(self, _request: HttpRequest) -> Response:
        """GET /health: 200 while requests are served, else 503."""
        if self._engine.alive:
            return _json({"status": "ok"})
        state = self._engine.state.value
        return _json({"status": state, "why": self._engine.why}, 503)

    async def metrics(self, _request: HttpRequest) -> Response:
        """GET /metrics."""
        stats = await self._engine.stats()
        snapshot = Snapshot(self._engine.alive, stats, self._frontend.counters())
        return Response(self._metrics.render(snapshot), media_type=_METRICS_TYPE)

    async def models(self, _request: HttpRequest) -> Response:
        """GET /v1/models: the served name, then its aliases."""
        names = (self._options.model, *self._options.aliases)
        return _json({"object": "list", "data": [self._describe(name) for name in names]})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{id}; ids may hold slashes."""
        name = str(request.path_params["id"])
        if name not in (self._options.model, *self._options.aliases):
            return error_response(
                RequestError(
                    404,
                    "that model is not served here",
                    kind="invalid_request_error",
                    param="model",
                    code="model_not_found",
                )
            )
        return _json(self._describe(name))

    def _describe(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._options.created,
            "owned_by": "hpc",
            "root": self._options.model,
            "max_model_len": self._engine.max_context,
        }


def _json(value: dict[str, object], status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _http_error(_request: HttpRequest, error: Exception) -> Response:
    """Unknown routes and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    text = {404: "there is no such route", 405: "this route does not take that method"}.get(status, "refused")
    headers = error.headers if isinstance(error, HTTPException) else None  # `Allow`
    return error_response(RequestError(status, text, kind="invalid_request_error", code=code), headers)


async def _server_error(_request: HttpRequest, error: Exception) -> Response:
    """A fault of ours: the log has it, the client gets no internals."""
    _log.error("a request handler failed", exc_info=error)
    return error_response(
        RequestError(
            500, "the server failed to handle this request", kind="server_error", code="internal_error"
        )
    )

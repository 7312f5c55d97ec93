"""Who may talk to the server: host names against DNS rebinding, keys on every route but /health (D27)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hpc_server.options import ServerOptions
from hpc_server.protocols.errors import RequestError

__all__ = ["Guard", "error_response", "key_salt"]


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """An error as an HTTP answer."""
    sent = dict(headers or {})
    if error.status in (429, 503):
        sent["retry-after"] = "1"
    return Response(orjson.dumps(error.body()), error.status, sent, media_type="application/json")


def key_salt(options: ServerOptions, headers: Headers) -> bytes:
    """Namespace of the caller's cache entries: one a key where there are several (D14), else shared."""
    if len(options.api_keys) < 2:
        return b""
    return hashlib.sha256(_bearer(headers)).digest()[:16]


class Guard:
    """ASGI middleware. Answers 403 or 401 itself and lets the rest through."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope), scope["path"])
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> RequestError | None:
        hosts = self._options.allowed_hosts
        if hosts is not None:
            origin = headers.get("origin")
            named = headers.getlist("host") or [""]
            if len(named) > 1 or _host_of(f"//{named[0]}") not in hosts:
                return _forbidden("the Host header does not name this server")
            if origin is not None and _host_of(origin) not in hosts:
                return _forbidden("requests from web pages of other hosts are refused")
        if path == "/health" or not self._options.api_keys:
            return None
        given = _bearer(headers)
        # Every key is compared, in constant time: neither which one nor how much of it matched shows.
        matches = [hmac.compare_digest(given, key.encode()) for key in self._options.api_keys]
        if any(matches):
            return None
        return RequestError(
            401,
            "a valid API key is needed as a bearer token",
            kind="invalid_request_error",
            code="invalid_api_key",
        )


def _forbidden(message: str) -> RequestError:
    return RequestError(403, message, kind="permission_error", code="forbidden_host")


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _bearer(headers: Headers) -> bytes:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip().encode("utf-8") if scheme.lower() == "bearer" else b""

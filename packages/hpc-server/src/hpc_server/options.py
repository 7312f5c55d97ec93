"""Options of the engine and of the HTTP side: frozen, checked once, reported back as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import attrs

__all__ = ["EngineOptions", "ServerOptions"]

_Number = TypeVar("_Number", int, float)
_Check: TypeAlias = "Callable[[object, attrs.Attribute[_Number], _Number], None]"


def _within(low: _Number, high: _Number) -> _Check[_Number]:
    """A validator that names the option, the value seen and the bounds."""

    def check(_owner: object, attribute: attrs.Attribute[_Number], value: _Number) -> None:
        if isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
            raise ValueError(f"{attribute.name} is {value!r}; it must be a number in [{low}, {high}]")

    return check


@attrs.frozen
class EngineOptions:
    """How the worker schedules.

    prefill_chunk: most prompt tokens of one prefill call; also the longest a decode round is held up.
    max_queue: requests that may wait for a lane; further ones are refused with 429.
    landing_poll_s: how often copies are looked at while nothing else can be done.
    max_failures: rounds in a row that may fail before the engine gives up and reports itself unhealthy.

    Raises ValueError for a value outside its bounds.
    """

    prefill_chunk: int = attrs.field(default=2048, validator=_within(1, 1 << 20))
    max_queue: int = attrs.field(default=256, validator=_within(1, 1 << 20))
    landing_poll_s: float = attrs.field(default=0.001, validator=_within(1e-5, 1.0))
    max_failures: int = attrs.field(default=8, validator=_within(1, 1 << 20))


@attrs.frozen
class ServerOptions:
    """How the HTTP side behaves.

    model: the served name; aliases: further names that requests may use.
    strict: refuse unknown request fields instead of ignoring them (D11).
    max_body_bytes: longest request body; longer ones get 413.
    body_timeout_s: how long a body may take to arrive.
    ping_s: silence on a stream after which a comment is sent.
    api_keys: when not empty, every route but /health needs one of them as a bearer token (D27).
    allowed_hosts: accepted Host names, without port; None accepts all. `loopback_hosts` is for loopback.
    prefix_reuse: False keeps every request out of the cache.
    created: seconds since 1970, shown by /v1/models.

    Raises ValueError for a value outside its bounds.
    """

    model: str
    aliases: tuple[str, ...] = ()
    strict: bool = False
    max_body_bytes: int = attrs.field(default=32 << 20, validator=_within(1024, 1 << 32))
    body_timeout_s: float = attrs.field(default=60.0, validator=_within(0.01, 3600.0))
    ping_s: float = attrs.field(default=5.0, validator=_within(0.01, 10.0))
    api_keys: tuple[str, ...] = attrs.field(default=(), repr=False)
    allowed_hosts: frozenset[str] | None = None
    prefix_reuse: bool = True
    created: int = 0

    @staticmethod
    def loopback_hosts() -> frozenset[str]:
        """Names under which a browser or client on this machine reaches a loopback address."""
        return frozenset({"localhost", "127.0.0.1", "::1"})

"""Typed reading of a request's fields: every value has a type and a range, and errors name them (D11)."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping

from hpc_server.protocols.errors import RequestError, not_valid

__all__ = ["Fields", "Use", "shown", "unknown_fields"]


class Use(enum.Enum):
    """What an endpoint does with a field that it knows."""

    USED = "used"
    ACCEPTED = "accepted"
    """Checked; only some values are possible, and none changes the answer."""
    IGNORED = "ignored"
    """Known to be sent by clients, without a meaning here; any value."""


def unknown_fields(
    body: Mapping[str, object], table: Mapping[str, Use], *, strict: bool, prefix: str = ""
) -> tuple[str, ...]:
    """Names of fields that the table lacks. Raises RequestError for the first of them if strict."""
    unknown = tuple(f"{prefix}{name[:64]}" for name in body if name not in table)
    if strict and unknown:
        raise not_valid(unknown[0], "is not a field of this endpoint", code="unknown_parameter")
    return unknown


def shown(value: object) -> str:
    """A value for an error text: short, never a prompt."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 32 else f"a string of {len(value)} characters"
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return text if len(text) <= 32 else f"{text[:12]}… ({len(text)} digits)"


class Fields:
    """One JSON object. A field that is null counts as absent. All readers raise RequestError."""

    def __init__(self, body: Mapping[str, object], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Is it there and not null?"""
        return self._body.get(name) is not None

    def raw(self, name: str) -> object:
        """The value as parsed, None if absent."""
        return self._body.get(name)

    def error(self, name: str, expected: str, *, code: str | None = None) -> RequestError:
        """For a value that is not what it must be."""
        got = shown(self._body.get(name))
        return not_valid(f"{self._prefix}{name}", f"is {got}; it must be {expected}", code=code)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high]. 3.0 is one, true is not."""
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A finite number in [low, high], or in (low, high] if above."""
        value = self._body.get(name)
        if value is None:
            return None
        inside = (
            not isinstance(value, bool)
            and isinstance(value, int | float)
            and low <= value <= high
            and not (above and value == low)
        )
        if not inside:
            raise self.error(name, f"a number in {'(' if above else '['}{low:g}, {high:g}]")
        number = float(value)  # type: ignore[arg-type]  # `inside` says that it is a number
        if not math.isfinite(number):
            raise self.error(name, "finite")
        return number

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def string(self, name: str, max_chars: int) -> str | None:
        """Text of at most max_chars characters."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > max_chars:
            raise self.error(name, f"a string of at most {max_chars} characters")
        return value

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        """One of a few words."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, "one of " + ", ".join(sorted(choices)))
        return value

    def mapping(self, name: str) -> Mapping[str, object] | None:
        """A JSON object."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return value

    def array(self, name: str, max_items: int) -> list[object] | None:
        """A JSON array of at most max_items items."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > max_items:
            raise self.error(name, f"a list of at most {max_items} items")
        return value

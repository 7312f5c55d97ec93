"""Typed, range-checked reading of a JSON object's fields."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from hpc_qwen35.errors import ConfigError

__all__ = ["Fields"]


@attrs.frozen
class Fields:
    """Fields of one JSON object; `prefix` goes before a field's name in errors.

    Every method raises ConfigError, which names the field, the value and the bound. null reads as absent.
    """

    data: Mapping[str, object]
    prefix: str = ""

    def value(self, name: str) -> object:
        """The raw value, or None."""
        return self.data.get(name)

    def require(self, name: str, supported: object) -> None:
        """The field, if present, must have the only supported value."""
        found = self.value(name)
        if found is not None and found != supported:
            raise ConfigError(f"{self.prefix}{name} is {found!r}: only {supported!r} is supported")

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]."""
        found = self._present(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
            raise ConfigError(
                f"{self.prefix}{name} is {found!r}: must be a whole number from {low} to {high}"
            )
        return found

    def real(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number above `low` and at most `high`."""
        found = self._present(name, default)
        # NaN and infinities fail the comparison.
        if isinstance(found, bool) or not isinstance(found, int | float) or not low < found <= high:
            raise ConfigError(
                f"{self.prefix}{name} is {found!r}: must be a number above {low} and at most {high}"
            )
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        """A truth value."""
        found = self._present(name, default)
        if not isinstance(found, bool):
            raise ConfigError(f"{self.prefix}{name} is {found!r}: must be true or false")
        return found

    def _present(self, name: str, default: object) -> object:
        found = self.value(name)
        if found is None:
            found = default
        if found is None:
            raise ConfigError(f"{self.prefix}{name} is missing")
        return found

"""The exceptions of the index. All mean misuse or a broken ledger; expected outcomes are return values."""

__all__ = [
    "CacheError",
    "GeometryError",
    "InvariantError",
    "LaneError",
    "PolicyError",
    "PromptError",
    "StateError",
    "TicketError",
]


class CacheError(Exception):
    """Base of every error that hpc-index raises."""


class GeometryError(CacheError, ValueError):
    """A geometry that no cache can have. Names the field, its value and the bound."""


class PolicyError(CacheError, ValueError):
    """A policy or cost value out of range. Names the field, its value and the bound."""


class PromptError(CacheError, ValueError):
    """A prompt, or tokens given for one, of the wrong type, length or content."""


class LaneError(CacheError, KeyError):
    """No lane of that id runs."""

    def __str__(self) -> str:
        return str(self.args[0])


class StateError(CacheError, RuntimeError):
    """A call that the lane or the index is in no state for."""


class TicketError(CacheError, KeyError):
    """No plan of that ticket is on its way."""

    def __str__(self) -> str:
        return str(self.args[0])


class InvariantError(CacheError, AssertionError):
    """A ledger does not balance or a rule of §10 is broken: a fault of the index itself."""

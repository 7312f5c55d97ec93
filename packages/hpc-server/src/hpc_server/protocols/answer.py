"""What both endpoints' answers are made of, and the interface through which the app writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs

from hpc_index.ids import Int32Buffer
from hpc_index.requests import TokenLogprobs
from hpc_server.events import FinishReason, TextDelta
from hpc_server.protocols.common import Common, usage

__all__ = ["Answer", "Envelope", "Piece", "TokenTexts", "clamp_logprob", "token_text"]


class TokenTexts(Protocol):
    """The part of a tokenizer that answers need."""

    def token_bytes(self, token: int, /) -> bytes:
        """The bytes one id stands for."""


@attrs.frozen(eq=False)
class Piece:
    """What became known at once. ids: all new tokens, the closing stop token included.

    logprobs: of the tokens that have text, so without the closing one; `shown` are those tokens.
    """

    ids: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    deltas: tuple[TextDelta, ...] = ()


@attrs.define(eq=False)
class Envelope:
    """What every object of one answer repeats, and the counts that its usage reports."""

    id: str
    created: int
    model: str
    common: Common
    prompt: Int32Buffer
    tokens: TokenTexts
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def head(self, kind: str) -> dict[str, object]:
        """The fields that every object starts with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, object]:
        """Counts so far."""
        return usage(len(self.prompt), self.completion, self.cached, self.reasoning)


class Answer(Protocol):
    """Writes one request's answer, either as chunks or whole."""

    def opening(self) -> list[Mapping[str, object]]:
        """Chunks before the first token."""

    def chunks(self, piece: Piece) -> list[Mapping[str, object]]:
        """Chunks for new tokens; none if there is nothing to say yet."""

    def closing(self, reason: FinishReason) -> list[Mapping[str, object]]:
        """Chunks after the last token."""

    def whole(self, pieces: list[Piece], reason: FinishReason) -> Mapping[str, object]:
        """The answer of a request that does not stream."""


def token_text(tokens: TokenTexts, token: int) -> str:
    """A token as text; a fragment of a character shows as U+FFFD."""
    return tokens.token_bytes(token).decode("utf-8", errors="replace")


def clamp_logprob(value: float) -> float:
    """Minus infinity is not JSON; OpenAI writes -9999."""
    return max(float(value), -9999.0)

"""The records that cross the seam between a server and a program: one request, and what a step returns.

They live here because both sides import the index and neither imports the other. The index itself does
not read them.
"""

from __future__ import annotations

import enum

import attrs

from hpc_index.ids import Int32Buffer
from hpc_index.records import PromptView

__all__ = ["Outcome", "PrefillStep", "Request", "Sampling", "StepOut", "Suspended", "TokenLogprobs"]


@attrs.frozen
class Sampling:
    """How tokens are chosen. Defaults choose from the unchanged distribution.

    temperature: 0 takes the most likely token (after penalties and bias).
    top_k: 0 keeps all. top_p, min_p: 1.0 and 0.0 keep all.
    presence_penalty, frequency_penalty: subtracted from logits of generated tokens (OpenAI's meaning).
    repetition_penalty: divides positive, multiplies negative logits of prompt and generated tokens.
    logit_bias: (token id, added value) pairs.
    seed: of this request's own random stream; the server always resolves one. Draw i of a request
        depends on seed and i alone, whatever else is in the batch.
    logprobs: None for none; k >= 0 for the chosen token's and the k most likely tokens' log-probabilities
        (of the distribution before temperature and truncation).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None


@attrs.frozen(eq=False)
class Request:
    """One request as a program sees it. stop_tokens end it unless ignore_eos; grammar is None for now."""

    prompt: PromptView
    max_new: int
    sampling: Sampling
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    grammar: None = None


@attrs.frozen
class TokenLogprobs:
    """Natural-log probabilities for one generated token: its own, and the most likely (id, value) pairs."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class Outcome(enum.Enum):
    """What a decode round did for one lane."""

    TOKENS = "tokens"
    STOPPED = "stopped"
    """The last of the tokens is a stop token: the sequence is over."""
    SHORT = "short"
    """No page to grow into: nothing was computed. Pages come free by waiting if `landing`, otherwise a
    lane must be suspended (D7)."""
    FAILED = "failed"
    """The lane's restore failed, or its forward pass did: finish it as Failed."""


@attrs.frozen(eq=False)
class StepOut:
    """What one round gave one lane.

    tokens: int32 [k], newly chosen; the last is pending (chosen, not yet processed).
    logprobs: one a token when asked for, else empty.
    """

    tokens: Int32Buffer
    logprobs: tuple[TokenLogprobs, ...]
    outcome: Outcome
    landing: bool = False


@attrs.frozen(eq=False)
class PrefillStep:
    """What one prefill chunk did. first: the first generated token, once done.

    short: no page to compute into; nothing was done. Pages come free by waiting if `landing`, otherwise a
        lane must be suspended (see Outcome.SHORT).
    """

    frontier: int
    done: bool
    first: StepOut | None
    short: bool = False
    failed: bool = False
    landing: bool = False


@attrs.frozen(eq=False)
class Suspended:
    """A lane set aside (D7). Quote and admit a request whose prompt is `tokens`, and pass this on.

    tokens: int32 [n]: every processed token and then the pending one.
    generated: how many of them were generated.
    payload: the program's own (random stream, penalties, grammar); opaque to a server.
    """

    tokens: Int32Buffer
    generated: int
    payload: object

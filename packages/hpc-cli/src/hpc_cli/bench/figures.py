"""From what a client saw to the figures that are printed. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import attrs

__all__ = ["Figures", "Seen", "figures", "ideal_reuse", "median"]


@attrs.frozen(eq=False)
class Seen:
    """One request of the conversation, in the order sent. None: the server did not tell."""

    session: int
    turn: int
    ttft_ms: float
    decode_tok_s: float | None
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    prompt_ids: tuple[int, ...] | None
    reply_ids: tuple[int, ...] | None


@attrs.frozen
class Figures:
    """What one playing measured. None: the server did not tell what it takes.

    ttft_cold_ms: of the very first request. ttft_warm_median_ms: of all others.
    cached_fraction: cached over prompt tokens of all but the first.
    reuse_of_ideal: cached tokens of all but the first, over the longest prefixes that an earlier prompt with
        its reply shares, at most all but one token of the prompt (a reply needs one computed token).
    """

    ttft_cold_ms: float
    ttft_warm_median_ms: float
    cold_over_warm: float
    decode_tok_s: float | None
    cached_fraction: float | None
    reuse_of_ideal: float | None


def figures(requests: Sequence[Seen]) -> Figures:
    """The figures of one playing; `requests` holds at least two."""
    cold, *warm = requests
    warm_median = statistics.median(seen.ttft_ms for seen in warm)
    rates = [seen.decode_tok_s for seen in requests if seen.decode_tok_s is not None]
    cached = [seen.cached_tokens for seen in warm if seen.cached_tokens is not None]
    reused = sum(cached) if len(cached) == len(warm) else None
    ideal = sum((ideal_reuse(requests) or [])[1:])
    return Figures(
        ttft_cold_ms=cold.ttft_ms,
        ttft_warm_median_ms=warm_median,
        cold_over_warm=cold.ttft_ms / warm_median,
        decode_tok_s=statistics.median(rates) if rates else None,
        cached_fraction=None if reused is None else reused / sum(seen.prompt_tokens for seen in warm),
        reuse_of_ideal=None if reused is None or not ideal else reused / ideal,
    )


def ideal_reuse(requests: Sequence[Seen]) -> list[int] | None:
    """What a perfect cache of everything before would reuse, a request; None without ids."""
    history: list[tuple[int, ...]] = []
    ideal: list[int] = []
    for seen in requests:
        if seen.prompt_ids is None or seen.reply_ids is None:
            return None
        shared = max((_common(seen.prompt_ids, earlier) for earlier in history), default=0)
        ideal.append(min(shared, len(seen.prompt_ids) - 1))
        history.append(seen.prompt_ids + seen.reply_ids)
    return ideal


def median(playings: Sequence[Figures]) -> Figures:
    """Figure by figure; None where one of the playings has none."""

    def middle(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if len(known) == len(values) else None

    return Figures(
        ttft_cold_ms=statistics.median(played.ttft_cold_ms for played in playings),
        ttft_warm_median_ms=statistics.median(played.ttft_warm_median_ms for played in playings),
        cold_over_warm=statistics.median(played.cold_over_warm for played in playings),
        decode_tok_s=middle([played.decode_tok_s for played in playings]),
        cached_fraction=middle([played.cached_fraction for played in playings]),
        reuse_of_ideal=middle([played.reuse_of_ideal for played in playings]),
    )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for at, (mine, theirs) in enumerate(zip(a, b, strict=False)):
        if mine != theirs:
            return at
    return min(len(a), len(b))

"""The printed figures against hand-computed cases and a slow model of the ideal cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_cli.bench.figures import Figures, Seen, figures, ideal_reuse, median


def seen(
    prompt: tuple[int, ...] | None,
    reply: tuple[int, ...] | None = (),
    *,
    cached: int | None = 0,
    ttft: float = 1.0,
    rate: float | None = None,
    tokens: int = 0,
) -> Seen:
    return Seen(
        session=1,
        turn=1,
        ttft_ms=ttft,
        decode_tok_s=rate,
        prompt_tokens=len(prompt) if prompt is not None else tokens,
        cached_tokens=cached,
        completion_tokens=4,
        prompt_ids=prompt,
        reply_ids=reply,
    )


def test_a_hand_computed_case() -> None:
    """Three requests: one cold, one that continues it whole, one that shares half."""
    played = figures(
        [
            seen((1, 2, 3, 4), (5, 6), ttft=100.0, rate=10.0),
            seen((1, 2, 3, 4, 5, 6, 7, 8), (9,), cached=5, ttft=20.0, rate=30.0),
            seen((1, 2, 9, 9), (), cached=2, ttft=10.0, rate=20.0),
        ]
    )
    assert played.ttft_cold_ms == 100.0
    assert played.ttft_warm_median_ms == 15.0
    assert played.cold_over_warm == pytest.approx(100 / 15)
    assert played.decode_tok_s == 20.0
    assert played.cached_fraction == pytest.approx((5 + 2) / (8 + 4))
    assert played.reuse_of_ideal == pytest.approx((5 + 2) / (6 + 2))


def test_the_first_request_does_not_count_as_reuse() -> None:
    """Whatever the cold request reports changes neither fraction."""
    warm = seen((1, 2, 3), (), cached=1)
    a = figures([seen((1, 2), (), cached=0), warm])
    b = figures([seen((1, 2), (), cached=2), warm])
    assert (a.cached_fraction, a.reuse_of_ideal) == (b.cached_fraction, b.reuse_of_ideal)


def test_a_prompt_sent_again_needs_one_computed_token() -> None:
    """The ideal of an identical prompt is all but its last token."""
    assert ideal_reuse([seen((1, 2, 3)), seen((1, 2, 3))]) == [0, 2]


def test_what_a_server_does_not_tell_is_none() -> None:
    """Missing ids leave reuse_of_ideal open, missing cached tokens both fractions."""
    without_ids = figures([seen(None, None, tokens=4), seen(None, None, tokens=4, cached=2)])
    assert without_ids.cached_fraction == 0.5
    assert without_ids.reuse_of_ideal is None
    without_cached = figures([seen((1, 2)), seen((1, 2), cached=None)])
    assert without_cached.cached_fraction is None
    assert without_cached.reuse_of_ideal is None


def test_no_ideal_reuse_is_no_division() -> None:
    """Prompts that share nothing have no ratio to an ideal of zero."""
    assert figures([seen((1, 2)), seen((3, 4))]).reuse_of_ideal is None


Ids = tuple[int, ...]
ids = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=6))
def test_ideal_is_the_longest_shared_prefix(
    conversation: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """The slow model keeps every prefix of everything earlier in a set."""
    known: set[tuple[int, ...]] = {()}
    expected = []
    for prompt, reply in conversation:
        expected.append(max(n for n in range(len(prompt)) if prompt[:n] in known))
        whole = prompt + reply
        known |= {whole[:n] for n in range(len(whole) + 1)}
    assert ideal_reuse([seen(prompt, reply) for prompt, reply in conversation]) == expected


def test_median_is_figure_by_figure() -> None:
    """Each figure's median stands alone, and one that a playing lacks is None."""

    def of(value: float, rate: float | None) -> Figures:
        return Figures(value, value * 2, value * 3, rate, value * 4, None)

    assert median([of(1.0, 5.0), of(3.0, 7.0), of(2.0, 6.0)]) == of(2.0, 6.0)
    assert median([of(1.0, 5.0), of(2.0, None)]).decode_tok_s is None

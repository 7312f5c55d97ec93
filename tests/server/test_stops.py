"""Stop strings: the same text is given out however it arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_server.stops import MAX_STOP_CHARS, MAX_STOPS, StopMatcher
from hpc_server.text_errors import FrontendError

FEW = st.text(alphabet="ab\n", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4).map(tuple)


def slow(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Look at every beginning of the text in turn: the model."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(FEW, STOPS, st.lists(st.integers(0, 24), max_size=6))
def test_any_cut_gives_what_the_model_gives(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    """Text in any pieces gives the same output and hits the same stop string as the model."""
    matcher = StopMatcher(stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = "".join(matcher.feed(text[a:b]) for a, b in pairwise(edges))
    expected, found = slow(text, stops)
    assert out + matcher.flush() == expected
    assert matcher.found == found


@given(FEW, STOPS)
def test_what_is_given_out_is_never_taken_back(text: str, stops: tuple[str, ...]) -> None:
    """After each character what was given out begins the final output, and no more than needed is held."""
    matcher = StopMatcher(stops)
    final, _ = slow(text, stops)
    out = ""
    for end, char in enumerate(text, start=1):
        out += matcher.feed(char)
        assert final.startswith(out)
        if matcher.found is None:
            assert end - len(out) < max(map(len, stops), default=1)


def test_nothing_is_given_out_after_a_hit() -> None:
    """Once a stop string was found, further text is not given out."""
    matcher = StopMatcher(("END",))
    assert matcher.feed("one END two") == "one "
    assert matcher.feed("three") == ""
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (("a",) * (MAX_STOPS + 1), f"{MAX_STOPS + 1} stop strings, at most {MAX_STOPS}"),
        (("",), r"stop\[0\]: 0 characters"),
        (("a", "b" * (MAX_STOP_CHARS + 1)), r"stop\[1\]: 1025 characters, need 1 to 1024"),
    ],
)
def test_bounds_are_named(stops: tuple[str, ...], message: str) -> None:
    """Too many stop strings, empty ones and too long ones are refused with value and bound."""
    with pytest.raises(FrontendError, match=message):
        StopMatcher(stops)


def test_the_longest_bounds_are_cheap() -> None:
    """Text that nearly matches the longest stop strings all the time is read in one pass."""
    matcher = StopMatcher(tuple("a" * 1000 + chr(98 + i) for i in range(4)))
    assert matcher.feed("a" * 20_000) == "a" * 19_000
    assert matcher.flush() == "a" * 1000

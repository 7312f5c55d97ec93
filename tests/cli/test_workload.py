"""The conversation has the sizes it promises and repeats exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_cli.bench.workload import (
    REPLY_TOKENS,
    SESSIONS,
    SYSTEM_TOKENS,
    TURN_TOKENS,
    TURNS,
    Scale,
    Script,
    text,
)


@given(st.integers(1, 400), st.text(max_size=8))
def test_text_has_the_words_asked_for(words: int, seed: str) -> None:
    """A word is what a space ends, punctuation included."""
    assert len(text(words, seed).split()) == words


def test_text_depends_on_the_seed_alone() -> None:
    """The same seed gives the same text; another differs within its first few words."""
    assert text(50, "a") == text(50, "a")
    assert text(50, "a").split()[:6] != text(50, "b").split()[:6]


@given(st.floats(0.5, 6.0), st.integers(0, 60))
def test_scale_recovers_the_measured_line(slope: float, overhead: int) -> None:
    """Two points of a line give the line."""
    scale = Scale.of((96, round(96 * slope) + overhead), (480, round(480 * slope) + overhead))
    assert scale.tokens_per_word == pytest.approx(slope, abs=0.01)
    assert scale.overhead == pytest.approx(overhead, abs=1.0)


@pytest.mark.parametrize("slope", [1.0, 1.7, 3.2])
def test_sizes_come_out_as_stated(slope: float) -> None:
    """System prompt and turns have the stated tokens within two percent on any tokenizer."""
    script = Script(scale=Scale(tokens_per_word=slope, overhead=14.0), seed="s")
    system = len(script.system()["content"].split()) * slope
    turn = len(script.user(0, 0)["content"].split()) * slope + 14.0 + REPLY_TOKENS
    assert system == pytest.approx(SYSTEM_TOKENS, rel=0.02)
    assert turn == pytest.approx(TURN_TOKENS, rel=0.02)


def test_only_the_system_prompt_is_shared() -> None:
    """Every user message differs from its first words on, in sessions and in turns."""
    script = Script(scale=Scale(tokens_per_word=1.0, overhead=0.0), seed="s")
    users = [script.user(session, turn)["content"] for session in range(SESSIONS) for turn in range(TURNS)]
    assert len({" ".join(user.split()[:6]) for user in users}) == SESSIONS * TURNS
    assert script.system() == Script(scale=script.scale, seed="s").system()

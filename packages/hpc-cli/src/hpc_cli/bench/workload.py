"""What the bench says: two sessions on one system prompt, every turn a little longer.

Texts are made of common words from a seed, so a run can be repeated exactly and another seed shares no
prefix with it. Sizes are in tokens of the model under test, which only its server knows: two short requests
tell how many tokens a word takes there, and what the chat template adds to a turn.
"""

from __future__ import annotations

import random

import attrs

__all__ = [
    "REPLY_TOKENS",
    "SESSIONS",
    "SYSTEM_TOKENS",
    "TURNS",
    "TURN_TOKENS",
    "Message",
    "Scale",
    "Script",
    "text",
]

SESSIONS = 2
TURNS = 6
SYSTEM_TOKENS = 3000
TURN_TOKENS = 250
"""Tokens that a turn adds: the user's message, the template's, and the reply."""
REPLY_TOKENS = 64

Message = dict[str, str]

_WORDS = (
    "river",
    "stone",
    "garden",
    "letter",
    "morning",
    "paper",
    "window",
    "bridge",
    "forest",
    "number",
    "kitchen",
    "doctor",
    "summer",
    "engine",
    "village",
    "market",
    "answer",
    "silver",
    "branch",
    "winter",
    "teacher",
    "yellow",
    "silent",
    "station",
    "travel",
    "harbor",
    "button",
    "mirror",
    "candle",
    "season",
    "record",
    "pocket",
    "valley",
    "dinner",
    "circle",
    "island",
    "thunder",
    "ladder",
    "basket",
    "corner",
    "planet",
    "copper",
    "meadow",
    "shadow",
    "signal",
    "cotton",
    "fabric",
    "moment",
    "animal",
    "butter",
    "camera",
    "desert",
    "flower",
    "guitar",
    "hammer",
    "jacket",
    "lemon",
)


def text(words: int, seed: str) -> str:
    """`words` words in sentences of a dozen, the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    picked = rng.choices(_WORDS, k=words)
    sentences = [picked[at : at + 12] for at in range(0, words, 12)]
    return " ".join(" ".join(sentence).capitalize() + "." for sentence in sentences)


@attrs.frozen
class Scale:
    """How text becomes tokens on the server under test.

    tokens_per_word: of `text`. overhead: tokens that a request with one user message has beyond its words.
    """

    tokens_per_word: float
    overhead: float

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> Scale:
        """From two measured (words, prompt tokens) pairs of different length."""
        slope = (long[1] - short[1]) / (long[0] - short[0])
        return cls(tokens_per_word=slope, overhead=short[1] - slope * short[0])

    def words(self, tokens: float) -> int:
        """Words that take about so many tokens; at least 12, so that no message is empty."""
        return max(12, round(tokens / self.tokens_per_word))


@attrs.frozen
class Script:
    """One playing of the conversation. Another `seed` shares nothing with it."""

    scale: Scale
    seed: str

    def system(self) -> Message:
        """The prompt that all sessions share."""
        return {"role": "system", "content": text(self.scale.words(SYSTEM_TOKENS), f"{self.seed} system")}

    def user(self, session: int, turn: int) -> Message:
        """What the user of `session` says in `turn`, both counted from 0."""
        own = TURN_TOKENS - REPLY_TOKENS - self.scale.overhead
        return {"role": "user", "content": text(self.scale.words(own), f"{self.seed} {session} {turn}")}

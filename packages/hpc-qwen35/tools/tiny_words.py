"""The word lists of the tiny corpus, read from `tiny_words.txt`, and the inflections derived from them."""

from __future__ import annotations

from pathlib import Path

import attrs

__all__ = ["Words", "inflected", "plural", "read_words"]

_VOWELS = "aeiou"
_FORMS = "sdpg"
"""Third person, past, participle, -ing form: the order of [irregular]."""


@attrs.frozen
class Words:
    """Words by part of speech, the commonest first. irregular: verb → its four forms."""

    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    adjectives: tuple[str, ...]
    adverbs: tuple[str, ...]
    connectives: tuple[str, ...]
    function: tuple[str, ...]
    names: tuple[str, ...]
    places: tuple[str, ...]
    identifiers: tuple[str, ...]
    irregular: dict[str, tuple[str, ...]]


def read_words(path: Path) -> Words:
    """The lists of a word file: `[section]` lines, words between them, `#` comments."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            current.append(line)
    rows = [line.split() for line in sections.pop("irregular")]
    lists = {name: tuple(" ".join(lines).split()) for name, lines in sections.items()}
    return Words(**lists, irregular={row[0]: tuple(row[1:]) for row in rows})


def plural(noun: str) -> str:
    """The regular plural, which is also a verb's regular third person."""
    if noun.endswith("y") and noun[-2] not in _VOWELS:
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def inflected(words: Words, verb: str, form: str) -> str:
    """`form`: v (base), s (third person), d (past), p (participle) or g (-ing)."""
    if form == "v":
        return verb
    if verb in words.irregular:
        return words.irregular[verb][_FORMS.index(form)]
    if form == "s":
        return plural(verb)
    if form == "g":
        return (verb[:-1] if verb.endswith("e") and not verb.endswith("ee") else verb) + "ing"
    if verb.endswith("y") and verb[-2] not in _VOWELS:
        return verb[:-1] + "ied"
    return verb + ("d" if verb.endswith("e") else "ed")

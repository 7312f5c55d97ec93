"""A rendered frame cut into structural tokens and texts, and into turns (design D22).

The frame is the template's writing. Structural tokens are recognised in it alone; then each placeholder
becomes the client's text, and all text between two structural tokens is one string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from hpc_server.placeholders import Placeholders

__all__ = ["Cutter", "Frame", "Item", "Turn", "turns"]

Item: TypeAlias = "int | str"
"""A structural token's id, or a text that is encoded as one string."""


@attrs.frozen(eq=False)
class Frame:
    """items: the frame in order. seen: texts that it holds, by placeholder index.

    mark: (item, character) where the marked placeholder's text begins, None where it is not there.
    """

    items: list[Item]
    seen: frozenset[int]
    mark: tuple[int, int] | None

    def structure(self) -> list[int]:
        """The structural tokens alone."""
        return [item for item in self.items if isinstance(item, int)]


@attrs.frozen
class Turn:
    """Items [begin, end) of one turn: from its opening token up to, not including, its closing one."""

    begin: int
    end: int
    role: str


class Cutter:
    """Cuts rendered frames. Immutable and shared."""

    def __init__(self, placeholders: Placeholders, special_ids: Mapping[str, int]) -> None:
        self._placeholders = placeholders
        self._special_ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        tokens = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._pattern = re.compile(f"{placeholders.regex}|({tokens})")

    def cut(self, rendered: str, texts: Sequence[str], mark: int | None = None) -> Frame:
        """Cut a rendering whose placeholders stand for `texts`."""
        placeholders = self._placeholders
        items: list[Item] = []
        parts: list[str] = []
        seen: set[int] = set()
        marked: tuple[int, int] | None = None
        at = 0
        for hit in self._pattern.finditer(rendered):
            if hit.start() > at:
                parts.append(rendered[at : hit.start()])
            at = hit.end()
            token = hit[3]
            if token is None:
                index = placeholders.index(hit[1])
                seen.add(index)
                if index == mark and marked is None:
                    marked = (len(items), sum(map(len, parts)))
                parts.append(placeholders.escaped(texts[index], hit[2]))
            else:
                if parts:
                    items.append("".join(parts))
                    parts = []
                items.append(self._special_ids[token])
        parts.append(rendered[at:])
        if text := "".join(parts):
            items.append(text)
        return Frame(items, frozenset(seen), marked)


def turns(items: Sequence[Item], opens: int, closes: int) -> list[Turn]:
    """The turns of a frame; a turn's role is what stands on the line after its opening token."""
    found: list[Turn] = []
    begin: int | None = None
    for i, item in enumerate([*items, closes]):
        if begin is not None and item in (opens, closes):
            head = items[begin + 1] if begin + 1 < i else ""
            found.append(Turn(begin, i, head.split("\n", 1)[0].strip() if isinstance(head, str) else ""))
            begin = None
        if item == opens:
            begin = i
    return found

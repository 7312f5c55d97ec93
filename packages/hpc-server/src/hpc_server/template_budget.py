"""How much a chat template may do: seconds, steps, characters and the size of what it builds.

A template is a program out of a model folder, so it may be hostile or broken. It is stopped from inside:
everything in it that can repeat or grow asks the budget first, and no single operation is larger than
the bounds, so that the deadline is looked at often enough to hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

import attrs

from hpc_server.text_errors import TemplateError

__all__ = ["Bounds", "Budget"]

_LOOK_EVERY = 64
"""Steps between two looks at the clock; one step costs a few microseconds at most."""


@attrs.frozen
class Bounds:
    """Bounds of one rendering.

    seconds: from the start of the rendering to the moment it is stopped. A good template takes milliseconds.
    text: most characters of one string, and of the whole output.
    chars: most characters of all strings built on the way.
    items: most elements of one container, nested ones counted wherever they occur.
    """

    seconds: float = 1.5
    text: int = 1 << 20
    chars: int = 1 << 26
    items: int = 100_000

    def enlarged(self, chars: int) -> Bounds:
        """The bounds for a rendering that is given `chars` more characters to work on."""
        return attrs.evolve(self, text=self.text + 2 * chars, chars=self.chars + 16 * chars)


class Budget:
    """What is left of the bounds. Mutable, used by one rendering on one thread."""

    __slots__ = ("_bounds", "_chars", "_end", "_look")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._end = time.monotonic() + bounds.seconds
        self._chars = bounds.chars
        self._look = _LOOK_EVERY

    def step(self, count: int = 1) -> None:
        """Account for `count` steps.

        Raises:
            TemplateError: the time is spent.
        """
        self._look -= count
        if self._look <= 0:
            self._look = _LOOK_EVERY
            if time.monotonic() > self._end:
                raise TemplateError(f"chat template: runs longer than {self._bounds.seconds} s")

    def text(self, chars: int) -> None:
        """Account for a string of `chars` characters, before it is built.

        Raises:
            TemplateError: it is longer than one string, or all strings together, may be.
        """
        if chars > self._bounds.text:
            raise TemplateError(f"chat template: a string of {chars} characters, at most {self._bounds.text}")
        self._chars -= chars
        if self._chars < 0:
            raise TemplateError(f"chat template: builds more than {self._bounds.chars} characters")
        self.step(1 + (chars >> 12))

    def items(self, count: int) -> None:
        """Account for a container of `count` elements, before it is built.

        Raises:
            TemplateError: it is larger than a container may be.
        """
        if count > self._bounds.items:
            raise TemplateError(
                f"chat template: a container of {count} elements, at most {self._bounds.items}"
            )
        self.step(1 + (count >> 6))

    def value(self, value: object) -> None:
        """Account for a value that is about to be copied, compared or written out.

        A list that holds another one twice, thirty levels deep, takes no memory and never ends; so nested
        elements count wherever they occur, and the walk stops at the bound.

        Raises:
            TemplateError: it is larger than a container or a string may be.
        """
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            seen = 0
            chars = 0
            waiting: list[object] = [value]
            while waiting:
                item = waiting.pop()
                if isinstance(item, str):
                    chars += len(item)
                    continue
                if isinstance(item, Mapping):
                    seen += len(item)
                    self.items(seen)
                    waiting.extend(item.keys())
                    waiting.extend(item.values())
                elif isinstance(item, (list, tuple, set, frozenset)):
                    seen += len(item)
                    self.items(seen)
                    waiting.extend(item)
            self.text(chars)

    def each(self, items: Iterable[object], chars: int) -> Iterator[object]:
        """The items of a loop, each a step and `chars` characters that its body writes out."""
        for item in items:
            self._chars -= chars
            self._look -= 1
            if self._look <= 0 or self._chars < 0:
                self.text(0)
            yield item

"""One reply: ids as they are generated to reasoning and content, as a client sees them.

The think block is told by token ids: whether it is open at the start is what the renderer wrote, after
that `<think>` and `</think>` switch. Text that merely reads like them switches nothing (design D22).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Literal, TypeAlias

import attrs

from hpc_server.detokenize import Detokenizer
from hpc_server.echo import ReplyParts
from hpc_server.stops import StopMatcher
from hpc_server.tokenizer import Tokenizer

__all__ = ["Delta", "DeltaKind", "OutputStream"]

DeltaKind: TypeAlias = Literal["reasoning", "content"]


@attrs.frozen
class Delta:
    """A piece of a reply.

    tokens: positions in the reply of the ids whose text is complete with this piece, for their
        log-probabilities. Ids that show no text (`<|im_end|>`, think tokens) belong to no piece.
    """

    kind: DeltaKind
    text: str
    tokens: tuple[int, ...] = ()


class OutputStream:
    """Turns the ids of one reply into deltas. Feeding one id at a time gives the same text as all at once.

    Newlines next to think tokens are the template's, not the reply's: those that open or close the
    reasoning and those between `</think>` and the content are left out. Stop strings act on content only:
    a client that stops at a blank line does not mean the blank lines of the reasoning.

    tokens: ids taken so far; none are taken after a stop string.
    reasoning_tokens: ids that belong to the reasoning, think tokens included.
    stopped: a stop string was hit; `stop_string` is that one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        starts_in_reasoning: bool = False,
        stops: tuple[str, ...] = (),
        parse_thinking: bool = True,
        skip_special: bool = True,
    ) -> None:
        """parse_thinking: False for raw completions, where think tokens are shown like any text.

        Raises:
            FrontendError: `stops` are not valid.
        """
        special = tokenizer.special_ids if parse_thinking else {}
        self._open = special.get("<think>")
        self._close = special.get("</think>")
        self._hidden = tokenizer.hidden_ids if skip_special else frozenset()
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._in_reasoning = starts_in_reasoning
        self._newlines = ""  # seen in the reasoning and not given out: they may turn out to close it
        self._trim_left = starts_in_reasoning
        self._texts: dict[DeltaKind, list[str]] = {"reasoning": [], "content": []}
        self._waiting: list[int] = []
        self._ends: list[int] = []  # of each id: characters of content, shown or held back, up to its end
        self._content_chars = 0
        self.tokens = 0
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """Was a stop string hit? The reply is over."""
        return self._matcher.found is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was hit."""
        return self._matcher.found

    @property
    def text(self) -> str:
        """Content given out so far."""
        return "".join(self._texts["content"])

    @property
    def reasoning(self) -> str:
        """Reasoning given out so far."""
        return "".join(self._texts["reasoning"])

    @property
    def in_reasoning(self) -> bool:
        """Is the think block open?"""
        return self._in_reasoning

    def feed(self, token_ids: Iterable[int]) -> list[Delta]:
        """Take ids in order and return what became visible. Ids after a stop string are not taken."""
        deltas: list[Delta] = []
        for token in map(int, token_ids):
            if self.stopped:
                break
            self._take(token, deltas)
            self.tokens += 1
        return _merged(deltas)

    def finish(self) -> list[Delta]:
        """The reply is over: give out what was held back. Call once."""
        deltas: list[Delta] = []
        if not self.stopped:
            self._show(self._detokenizer.flush(), deltas)
            if not self._in_reasoning:
                self._give("content", self._matcher.flush(), deltas)
        return _merged(deltas)

    def parts(self) -> ReplyParts:
        """What the client saw, and which ids stand for it, for `Frontend.record_reply`; after `finish`."""
        if not self.stopped:
            return ReplyParts(content=self.text, reasoning=self.reasoning)
        text = self.text
        kept = bisect_right(self._ends, len(text))
        shown = self._ends[kept - 1] if kept else 0
        return ReplyParts(content=text, reasoning=self.reasoning, kept=kept, remainder=text[shown:])

    def _take(self, token: int, deltas: list[Delta]) -> None:
        switch = self._close if self._in_reasoning else self._open
        self.reasoning_tokens += self._in_reasoning or token == switch
        if token == switch:
            self._switch(deltas)
        elif token not in self._hidden:
            self._waiting.append(self.tokens)
            self._show(self._detokenizer.feed(token), deltas)
        # An id that ends inside a character reaches beyond the text before it.
        inside = not self._in_reasoning and self._detokenizer.pending
        self._ends.append(self._content_chars + inside)

    def _switch(self, deltas: list[Delta]) -> None:
        self._show(self._detokenizer.flush(), deltas)
        if not self._in_reasoning:
            self._give("content", self._matcher.flush(), deltas)
        self._newlines = ""
        self._waiting = []
        self._in_reasoning = not self._in_reasoning
        self._trim_left = True

    def _show(self, text: str, deltas: list[Delta]) -> None:
        if self._trim_left:
            text = text.lstrip("\n")
            self._trim_left = not text
        if not text:
            return
        if self._in_reasoning:
            text = self._newlines + text
            body = text.rstrip("\n")
            self._newlines = text[len(body) :]
            self._give("reasoning", body, deltas)
        else:
            self._content_chars += len(text)
            self._give("content", self._matcher.feed(text), deltas)

    def _give(self, kind: DeltaKind, text: str, deltas: list[Delta]) -> None:
        if text:
            self._texts[kind].append(text)
            waiting = self._shown() if self.stopped else self._waiting
            deltas.append(Delta(kind, text, tuple(waiting)))
            self._waiting = []

    def _shown(self) -> list[int]:
        """Of the waiting ids those that end before the stop string."""
        end = len(self.text)
        return [at for at in self._waiting if at < len(self._ends) and self._ends[at] <= end]


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if last is not None and last.kind == delta.kind:
            merged[-1] = Delta(last.kind, last.text + delta.text, last.tokens + delta.tokens)
        else:
            merged.append(delta)
    return merged

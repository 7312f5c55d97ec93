"""A frame to a prompt: tokens, tap hints (§7.1, §8.3), kept replies in place of echoed ones (D21)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

import numpy as np

from hpc_index.ids import Int32Array, Int32Buffer
from hpc_index.records import HintKind, TapHint
from hpc_server.chat_messages import Conversation
from hpc_server.echo import EchoContext, EchoStore, Kept, ReplyParts
from hpc_server.frame import Frame, Turn, turns
from hpc_server.template_probe import TemplateProbe
from hpc_server.text_cache import TextCache
from hpc_server.text_errors import PromptTooLongError

__all__ = ["Assembly"]


class Assembly:
    """Tokens and hints of one frame, turn by turn, with kept replies put in. Mutable, used once.

    hints: in order of position. counts: for the frontend's counters.
    starts_in_reasoning: the generation opener left a think block open. Complete after `run`.
    """

    def __init__(
        self,
        frame: Frame,
        conversation: Conversation,
        *,
        probe: TemplateProbe,
        texts: TextCache,
        echo: EchoStore,
        salt: bytes,
        cacheable: bool,
        preserve: bool,
        exceeds: Callable[[str, int], bool],
        max_tokens: int | None = None,
    ) -> None:
        """preserve: think blocks of earlier turns are to stay; False leaves them to the template.

        max_tokens, exceeds: longest prompt worth finishing, and whether a text alone is longer than that.
        """
        self._exceeds = exceeds
        self._max_tokens = max_tokens
        self._probe = probe
        self._texts = texts
        self._echo = echo
        self._frame = frame
        self._conversation = conversation
        self._salt = salt
        self._cacheable = cacheable
        self._preserve = preserve
        self._turns = self._find_turns()
        last = self._turns[-1] if self._turns else None
        unclosed = last is not None and last.role == probe.assistant and last.end == len(frame.items)
        self._opener_turn = last if unclosed else None
        self._chunks: list[Int32Array] = []
        self._length = 0
        self._digest = hashlib.blake2b(salt, digest_size=16)
        self._digested = 0
        self._opener: tuple[int, bytes] | None = None
        self.hints: list[TapHint] = []
        self.counts: Counter[str] = Counter()
        self.starts_in_reasoning = False

    def run(self) -> None:
        """Assemble the prompt.

        Raises:
            PromptTooLongError: it has more than max_tokens.
            EncodingError: the tokenizer gives up on a text.
        """
        items = self._frame.items
        by_begin = {turn.begin: turn for turn in self._turns}
        replies = self._replies()
        in_system = True
        i = 0
        while i < len(items):
            turn = by_begin.get(i)
            if turn is not None:
                if in_system and turn.role != "system":
                    in_system = False
                    self._hint(HintKind.STRUCTURAL, self._length)
                self._hint(HintKind.MESSAGE, self._length)
                if turn is self._opener_turn:
                    self._open(turn)
                kept = self._kept(turn, replies[i]) if i in replies else None
                if kept is not None:
                    self._append(kept.opener)
                    self._append(kept.ids)
                    i = turn.end
                    if i < len(items) and len(kept.ids) and kept.ids[-1] == items[i]:
                        i += 1  # the reply brought its end-of-turn token along
                    continue
            self._append(self._encoded(i))
            i += 1

    def tokens(self) -> Int32Buffer:
        """The prompt's tokens, int32 [n]."""
        return np.concatenate(self._chunks) if self._chunks else np.empty(0, dtype=np.int32)

    def context(self, tokens: Int32Buffer) -> EchoContext | None:
        """What to record with the reply; None where nothing may be, or where there is no opener."""
        if self._opener is None or not self._cacheable:
            return None
        position, digest = self._opener
        return EchoContext(prompt=digest, opener=tokens[position:].copy(), salt=self._salt)

    def _find_turns(self) -> list[Turn]:
        if self._probe.opens is None or self._probe.closes is None:
            return []
        return turns(self._frame.items, self._probe.opens, self._probe.closes)

    def _replies(self) -> dict[int, ReplyParts]:
        """Replies by the item where their turn begins, if every assistant message has a turn of its own."""
        said = self._conversation.replies
        found = [t for t in self._turns if t.role == self._probe.assistant and t is not self._opener_turn]
        if len(found) != len(said):
            self.counts["echo_miss.no_turn"] += len(said)
            return {}
        if not self._cacheable:
            self.counts["echo_miss.not_cacheable"] += len(said)
            return {}
        return {turn.begin: parts for turn, parts in zip(found, said, strict=True)}

    def _kept(self, turn: Turn, parts: ReplyParts) -> Kept | None:
        """The kept reply that stands for a turn."""
        found = self._echo.find(self._salt, self._prompt_digest(), parts)
        if isinstance(found, Kept) and not self._preserve and self._stripped(turn, found):
            found = "stripped"
        if isinstance(found, str):
            self.counts[f"echo_miss.{found}"] += 1
            return None
        self.counts["echo_hit"] += 1
        return found

    def _stripped(self, turn: Turn, kept: Kept) -> bool:
        """Would the kept ids bring back a think block that the client asked the template to strip?"""
        think = self._probe.think
        has_block = kept.thinks or (think is not None and think in kept.opener)
        return has_block and think not in self._frame.items[turn.begin : turn.end]

    def _open(self, turn: Turn) -> None:
        """The generation opener begins here."""
        self._hint(HintKind.OPENER, self._length)
        self._opener = (self._length, self._prompt_digest())
        think = [
            item
            for item in self._frame.items[turn.begin :]
            if item in (self._probe.think, self._probe.end_think)
        ]
        self.starts_in_reasoning = bool(think) and think[-1] == self._probe.think

    def _encoded(self, i: int) -> Int32Buffer:
        item = self._frame.items[i]
        if isinstance(item, int):
            return np.array([item], dtype=np.int32)
        ids = self._encode(item)
        mark = self._frame.mark
        if mark is not None and mark[0] == i and self._conversation.tools and self._probe.tools_first:
            # What stays the same whatever system text follows, or none; white space before it goes with it.
            before = self._encode(item[: mark[1]].rstrip())
            shared = min(len(before), len(ids))
            differs = np.flatnonzero(before[:shared] != ids[:shared])
            self._hint(HintKind.STRUCTURAL, self._length + (int(differs[0]) if len(differs) else shared))
        return ids

    def _encode(self, text: str) -> Int32Buffer:
        if self._max_tokens is not None and self._exceeds(text, self._max_tokens):
            raise PromptTooLongError("messages", self._max_tokens)
        return self._texts.encode(text, self._salt, keep=self._cacheable)

    def _append(self, ids: Int32Buffer) -> None:
        self._chunks.append(ids)
        self._length += len(ids)
        if self._max_tokens is not None and self._length > self._max_tokens:
            raise PromptTooLongError("messages", self._max_tokens)

    def _prompt_digest(self) -> bytes:
        """Digest of the namespace and all tokens so far."""
        for ids in self._chunks[self._digested :]:
            self._digest.update(np.ascontiguousarray(ids).data)
        self._digested = len(self._chunks)
        return self._digest.digest()

    def _hint(self, kind: HintKind, position: int) -> None:
        if position > 0:
            self.hints.append(TapHint(position, kind))
            self.counts[f"hints.{kind.value}"] += 1

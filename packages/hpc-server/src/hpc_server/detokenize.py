"""Ids to text, as they come: a character is given out once all of its bytes are there."""

from __future__ import annotations

import codecs

from hpc_server.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Decodes one reply. What it gives out over time is what decoding all ids at once gives.

    Mutable, owned by one reply. Bytes that can no longer become a character come out as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Text that is complete with this id."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What an unfinished character at the end comes to: one U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)

    @property
    def pending(self) -> bool:
        """Does an unfinished character wait for its next byte?"""
        return bool(self._decoder.getstate()[0])

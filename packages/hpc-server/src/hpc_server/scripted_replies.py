"""What the scripted program says: lines of a file, or a function of the prompt."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol

import attrs
import numpy as np

from hpc_index.ids import Int32Buffer
from hpc_server.tokenizer import Tokenizer

__all__ = ["FileReplies", "HashReplies", "Replies", "ScriptFileError"]


class ScriptFileError(ValueError):
    """A script that cannot be read; names file and line."""


class Replies(Protocol):
    """Chooses the tokens that follow a prompt."""

    def reply(self, prompt: Int32Buffer) -> Int32Buffer:
        """The reply to a prompt, int32 [k]; asked once a request."""

    def filler(self, prompt: Int32Buffer, i: int) -> int:
        """Token i of a reply that must go on after its script is over (`ignore_eos`)."""


@attrs.frozen
class HashReplies:
    """Pseudo-random tokens of [low, high), a function of the prompt and the position alone.

    length: tokens of a reply, after which it ends; 0 never ends by itself.
    """

    low: int
    high: int
    length: int = 0

    def reply(self, prompt: Int32Buffer) -> Int32Buffer:
        """`length` tokens."""
        return np.array([self.filler(prompt, i) for i in range(self.length)], dtype=np.int32)

    def filler(self, prompt: Int32Buffer, i: int) -> int:
        """Token i."""
        seed = (int(prompt.sum(dtype=np.int64)) * 1_000_003 + len(prompt)) * 8191 + i
        return self.low + (seed * 0x9E3779B1 % (1 << 32)) % (self.high - self.low)


@attrs.frozen(eq=False)
class _Line:
    when: str | None
    ids: Int32Buffer


class FileReplies:
    r"""Replies from JSON lines: `{"text": …}` or `{"tokens": […]}`, each with an optional `"when"`.

    Special tokens in a text are those tokens: `"thinking…\n</think>\n\nreply"` ends its reasoning.
    A line with `when` answers every prompt whose text holds that string; the first such line wins. The
    other lines answer in order and start again after the last.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        """Raises ScriptFileError for a file that is missing or holds anything else."""
        self._tokenizer = tokenizer
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ScriptFileError(f"{path}: cannot be read: {error}") from error
        lines = [
            _read_line(line, f"{path}:{number}", tokenizer)
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        ]
        self._keyed = [line for line in lines if line.when is not None]
        self._ordered = [line for line in lines if line.when is None]
        self._next = 0
        if not lines:
            raise ScriptFileError(f"{path}: holds no reply")
        self._fallback = HashReplies(0, tokenizer.vocab_size)

    def reply(self, prompt: Int32Buffer) -> Int32Buffer:
        """The reply to a prompt. Raises LookupError if no line answers it."""
        if self._keyed:
            text = self._tokenizer.decode(prompt.tolist(), skip_special=False)
            for line in self._keyed:
                if line.when is not None and line.when in text:
                    return line.ids
        if not self._ordered:
            raise LookupError("no line of the script answers this prompt")
        line = self._ordered[self._next % len(self._ordered)]
        self._next += 1
        return line.ids

    def filler(self, prompt: Int32Buffer, i: int) -> int:
        """Tokens without structure."""
        for attempt in range(1 << 16):
            token = self._fallback.filler(prompt, i + attempt * 65537)
            if token not in self._tokenizer.special_ids.values():
                return token
        raise LookupError("the vocabulary has special tokens only")


def _encoded(text: str, tokenizer: Tokenizer) -> Int32Buffer:
    """A script's author means structure by `</think>`, other than a client does."""
    special = tokenizer.special_ids
    pattern = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    ids = [
        np.array([special[part]], dtype=np.int32) if part in special else tokenizer.encode_text(part)
        for part in parts
    ]
    return np.concatenate(ids)


def _read_line(line: str, at: str, tokenizer: Tokenizer) -> _Line:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ScriptFileError(f"{at}: not JSON: {error}") from error
    if not isinstance(value, dict) or ("text" in value) == ("tokens" in value):
        raise ScriptFileError(f"{at}: must be an object with either text or tokens")
    unknown = sorted(set(value) - {"text", "tokens", "when"})
    if unknown:
        raise ScriptFileError(f"{at}: unknown key {unknown[0]!r}")
    when, text, tokens = value.get("when"), value.get("text"), value.get("tokens")
    if when is not None and not isinstance(when, str):
        raise ScriptFileError(f"{at}: when must be a string")
    if tokens is None:
        if not isinstance(text, str):
            raise ScriptFileError(f"{at}: text must be a string")
        return _Line(when, _encoded(text, tokenizer))
    if not isinstance(tokens, list):
        raise ScriptFileError(f"{at}: tokens must be a list")
    for token in tokens:
        if type(token) is not int or not 0 <= token < tokenizer.vocab_size:
            raise ScriptFileError(f"{at}: {token!r} is not a token id in [0, {tokenizer.vocab_size})")
    return _Line(when, np.array(tokens, dtype=np.int32))

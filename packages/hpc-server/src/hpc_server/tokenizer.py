"""The checkpoint's tokenizer, split in two: text never yields a structural token (design D22).

`tokenizers` recognises added tokens wherever their text occurs, which lets a message that merely says
`<|im_end|>` end its own turn. So the tokenizer built here has none of them: it encodes text, and the
renderer puts structural ids where the template's frame has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tokenizers

from hpc_index.ids import Int32Buffer
from hpc_server.text_errors import EncodingError, TokenizerError

__all__ = ["Tokenizer"]

_FILE = "tokenizer.json"
_LONG_TOKEN_CHARS = 8
"""Text rarely has more characters a token than this; what stays below needs no second look at its length."""
_PIECE_CHARS = 1 << 16


class Tokenizer:
    """A byte-level BPE tokenizer as published: text to ids, ids to bytes.

    Immutable and safe to share between threads.

    vocab_size: one more than the largest id it knows; a model's table may have padding rows beyond.
    special_ids: text of every added token (`<|im_end|>`, `<think>` …) to its id.
    hidden_ids: the added tokens marked special, which never show in a reply's text.
    eos_ids: ids that end a reply.
    """

    def __init__(self, document: Mapping[str, object], *, file: Path, eos_ids: Iterable[int] = ()) -> None:
        """document: tokenizer.json, parsed. file: named in errors.

        Raises:
            TokenizerError: the document is not a byte-level tokenizer, or its text encoder yields
                structural ids.
        """
        added = _added_tokens(document, file)
        if not _is_byte_level(document.get("decoder")):
            raise TokenizerError(file, "decoder is not ByteLevel; only byte-level tokenizers are served")
        plain = dict(document) | {
            "added_tokens": [],
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        try:
            self._text = tokenizers.Tokenizer.from_str(json.dumps(plain))
        except Exception as error:  # the library raises bare Exception for a document it cannot read
            raise TokenizerError(file, f"not a tokenizer: {error}") from error
        self.special_ids: Mapping[str, int] = MappingProxyType({token: i for token, (i, _) in added.items()})
        self.hidden_ids = frozenset(i for i, special in added.values() if special)
        vocab = self._text.get_vocab(with_added_tokens=False)
        self.vocab_size = 1 + max([*vocab.values(), *self.special_ids.values()], default=-1)
        self.eos_ids = frozenset(eos_ids)
        for i in self.eos_ids:
            if not 0 <= i < self.vocab_size:
                raise TokenizerError(file, f"end-of-sequence id {i} is outside [0, {self.vocab_size})")
        self._unbyte = {char: byte for byte, char in enumerate(_byte_alphabet())}
        self._bytes: dict[int, bytes] = {i: token.encode() for token, i in self.special_ids.items()}
        self._check_text_is_no_structure(file)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` of a model folder, and from its other files which ids end a reply.

        Raises:
            TokenizerError: a file is missing, is not JSON, or does not hold what it should.
        """
        file = folder / _FILE
        document = _read_json(file)
        if document is None:
            raise TokenizerError(file, "no such file")
        return cls(document, file=file, eos_ids=_eos_ids(folder, document))

    def encode_text(self, text: str) -> Int32Buffer:
        """Ids of a text, int32 [k]. Never a structural id, whatever the text says (D22).

        Raises TypeError for a lone surrogate, which is not Unicode; callers check what clients send.
        Raises EncodingError if the library gives up, as its patterns do on megabytes of white space.
        """
        try:
            return np.array(self._text.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        except BaseException as error:  # the library panics past Exception
            if type(error).__name__ != "PanicException":
                raise
            raise EncodingError(f"a text of {len(text)} characters cannot be tokenised") from error

    def exceeds(self, text: str, tokens: int) -> bool:
        """Is a text sure to have more tokens than that? False if it needs encoding to tell.

        Counts piece by piece and stops early: a whole body of text would take seconds and gigabytes.
        """
        if len(text) <= _LONG_TOKEN_CHARS * tokens:
            return False
        count = 0
        for begin in range(0, len(text), _PIECE_CHARS):
            count += len(self.encode_text(text[begin : begin + _PIECE_CHARS]))
            if count > 2 * tokens:  # twice: cutting a text in pieces adds tokens, but never so many
                return True
        return False

    def encode_raw(self, text: str) -> Int32Buffer:
        """Ids of a raw completion prompt, int32 [k].

        The same as `encode_text`: a plain string is text on this route too, so that whoever pastes a
        document into a prompt cannot be made to open a turn. A client that wants structure sends ids.
        """
        return self.encode_text(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD. Ids without a token have no text."""
        hidden = self.hidden_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for; none for an id without a token (a model's padding rows)."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._to_bytes(self._text.id_to_token(token) if token >= 0 else None)
        return known

    def _to_bytes(self, piece: str | None) -> bytes:
        if piece is None:
            return b""
        codes = [self._unbyte.get(char) for char in piece]
        if None in codes:  # not written in the byte alphabet: stands for its own text
            return piece.encode()
        return bytes(code for code in codes if code is not None)

    def _check_text_is_no_structure(self, file: Path) -> None:
        structural = frozenset(self.special_ids.values())
        for token, i in self.special_ids.items():
            if structural.intersection(self._text.encode(token, add_special_tokens=False).ids):
                raise TokenizerError(
                    file, f"text {token!r} encodes to added token {i} even without added tokens"
                )


def _added_tokens(document: Mapping[str, object], file: Path) -> dict[str, tuple[int, bool]]:
    """Text to (id, special)."""
    entries = document.get("added_tokens") or []
    if not isinstance(entries, list):
        raise TokenizerError(file, f"added_tokens is {type(entries).__name__}, not a list")
    added: dict[str, tuple[int, bool]] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise TokenizerError(file, f"added token {entry!r} is not an object")
        content, i = entry.get("content"), entry.get("id")
        if not isinstance(content, str) or not content or type(i) is not int or not 0 <= i < 2**31:
            raise TokenizerError(
                file, f"added token {content!r} with id {i!r}: need text and an id of 31 bits"
            )
        for rule in ("lstrip", "rstrip", "single_word"):
            if entry.get(rule):
                raise TokenizerError(file, f"added token {content!r} has {rule}, which is not supported")
        added[content] = (i, bool(entry.get("special")))
    return added


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _eos_ids(folder: Path, document: Mapping[str, object]) -> frozenset[int]:
    """generation_config.json's ids; else the token that tokenizer_config.json names; else config.json's."""
    found = _ids_field(folder / "generation_config.json")
    if found:
        return found
    file = folder / "tokenizer_config.json"
    named = (_read_json(file) or {}).get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if isinstance(text, str):
        added = _added_tokens(document, folder / _FILE)
        if text not in added:
            raise TokenizerError(file, f"eos_token {text!r} is not among the added tokens of {_FILE}")
        return frozenset({added[text][0]})
    return _ids_field(folder / "config.json")


def _ids_field(file: Path) -> frozenset[int]:
    config = _read_json(file) or {}
    inner = config.get("text_config")
    value = config.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise TokenizerError(file, f"eos_token_id {value!r} is neither an id nor a list of ids")
    return frozenset(ids)


def _read_json(file: Path) -> dict[str, object] | None:
    """A JSON object, or None where there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(file, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(file, f"holds {type(value).__name__}, not an object")
    return value

"""Client text stands in for itself: a template sees placeholders, so text cannot act on the frame (D22).

Every string of a request that a client chose is replaced by a placeholder before the template runs, and
put back once the frame was cut at its structural tokens. Between the two no client text exists, so
nothing in it can end a turn, be split by the template's string tests, or join the frame around it to
form a token.

White space at both ends of a text stays outside its placeholder: a template that trims contents trims
them as if it saw them, and one that does not leaves them alone. JSON that a template makes of a
placeholder is followed: the placeholder notes how often it was escaped, and the text is escaped as often.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping

from hpc_server.text_errors import FrontendError

__all__ = ["MAX_DEPTH", "Mask", "MaskedTool", "Placeholders"]

MAX_DEPTH = 64
"""Deepest nesting of tools and of tool-call arguments."""

# Placeholders are written in private-use characters alone, which no string function of a template changes.
_OPEN, _CLOSE = "\ue000", "\ue001"
_DIGITS = [chr(0xE010 + digit) for digit in range(16)]
_ESCAPES = {"a": "\ue020", "u": "\ue021"}
_NONCE = [chr(code) for code in range(0xE100, 0xF900)]
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")

_SCHEMA_WORDS = (
    "$defs $ref additionalProperties allOf anyOf arguments const content default description enum "
    "examples exclusiveMaximum exclusiveMinimum format function id items maxItems maxLength maximum "
    "minItems minLength minimum name not oneOf parameters pattern properties required role strict title type"
)
_SCHEMA_KEYS = frozenset(_SCHEMA_WORDS.split())
"""Keys that templates look up by name. They are known words, so they stay as they are."""


class Placeholders:
    """The placeholders of one template: unguessable, since their nonce is drawn at random at start.

    The rendered result does not depend on the nonce. Immutable; shared by all requests.
    """

    def __init__(self) -> None:
        self.nonce = "".join(secrets.choice(_NONCE) for _ in range(6))
        digits, escapes = "".join(_DIGITS), "".join(_ESCAPES.values())
        self.regex = f"{_OPEN}{self.nonce}([{digits}]+)([{escapes}]*){_CLOSE}"
        self._pattern = re.compile(self.regex)
        self._marks = frozenset((_OPEN, _CLOSE, *self.nonce))

    def of(self, index: int, escapes: str = "") -> str:
        """The placeholder of text `index`; `escapes` are those of a placeholder found."""
        number = "".join(_DIGITS[int(digit, 16)] for digit in f"{index:x}")
        return f"{_OPEN}{self.nonce}{number}{escapes}{_CLOSE}"

    @staticmethod
    def index(digits: str) -> int:
        """The index in a placeholder found: group 1 of `regex`."""
        return int("".join(f"{ord(digit) - 0xE010:x}" for digit in digits), 16)

    @staticmethod
    def escaped(text: str, escapes: str) -> str:
        """A text as often escaped as its placeholder was: group 2 of `regex`."""
        for kind in escapes:
            text = json.dumps(text, ensure_ascii=kind == _ESCAPES["a"])[1:-1]
        return text

    def tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """The template filter: JSON in the order in which the client sent it, not escaped for HTML."""
        if isinstance(value, MaskedTool):
            if (ensure_ascii, indent, separators, sort_keys) == (False, None, None, False):
                return value._as_json()
            value = value._fields()
        if indent is not None and not 0 <= indent <= 16:
            raise ValueError(f"tojson: indent {indent}, need 0 to 16")
        text = json.dumps(
            value,
            ensure_ascii=False,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=_fields_of,
        )
        kind = _ESCAPES["a" if ensure_ascii else "u"]
        if ensure_ascii:
            text = "".join(
                part
                if self._pattern.fullmatch(part)
                else _NOT_ASCII.sub(lambda hit: json.dumps(hit[0])[1:-1], part)
                for part in self._split(text)
            )
        return self._pattern.sub(lambda hit: self.of(self.index(hit[1]), hit[2] + kind), text)

    def damaged(self, rendered: str, texts: Iterable[str] = ()) -> bool:
        """Did the template cut a placeholder apart? texts: what may stand in the rendering by itself."""
        strays = self._marks.intersection(self._pattern.sub("", rendered))
        return bool(strays) and not strays.issubset("".join(texts))

    def without(self, rendered: str) -> str:
        """The text with `…` for each placeholder, to be shown."""
        return self._pattern.sub("…", rendered)

    def _split(self, text: str) -> list[str]:
        """Placeholders and what lies between them."""
        parts: list[str] = []
        at = 0
        for hit in self._pattern.finditer(text):
            parts += [text[at : hit.start()], hit[0]]
            at = hit.end()
        return [*parts, text[at:]]


class Mask:
    """The placeholders of one rendering. Mutable, owned by it.

    texts: the text of each placeholder.
    """

    def __init__(
        self, placeholders: Placeholders, specials: Collection[str], plain: Collection[str] = ()
    ) -> None:
        """specials: texts of structural tokens. plain: texts that the template must see as they are.

        Of a plain text only what could become a structural token is replaced, alone or together with
        the frame around it.
        """
        self._placeholders = placeholders
        self._specials = specials
        self._plain = frozenset(plain)
        # A structural token with white space at its end could be completed by a text's own.
        self._keep_space = all(token == token.strip() for token in specials)
        self._index: dict[str, int] = {}
        self.texts: list[str] = []

    def text(self, text: str, param: str) -> str:
        """What stands for a text. Equal texts have equal placeholders, so a template may compare them.

        Raises:
            FrontendError: the text is not Unicode (a lone surrogate).
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise FrontendError(param, f"not valid Unicode at character {error.start}") from None
        core = self._core(text)
        if not core:
            return text
        at = text.index(core)
        body = self._armoured(core) if core in self._plain else self._placeholder(core)
        return text[:at] + body + text[at + len(core) :]

    def alone(self, text: str, param: str) -> tuple[str, int | None]:
        """Like `text`, with a placeholder of its own, whose index is returned (None where it has none)."""
        core = self._core(text)
        self._index.pop(core, None)
        masked = self.text(text, param)
        return masked, self._index.pop(core, None)

    def value(self, value: object, param: str, depth: int = 0) -> object:
        """A JSON value with every string in it masked, keys too unless templates look them up.

        Raises:
            FrontendError: it is nested deeper than MAX_DEPTH, or holds text that is not Unicode.
        """
        if isinstance(value, str):
            return self.text(value, param)
        if not isinstance(value, (dict, list)):
            return value
        if depth == MAX_DEPTH:
            raise FrontendError(param, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            return [self.value(item, param, depth + 1) for item in value]
        return {key: self.value(item, param, depth + 1) for key, item in self.keyed(value, param)}

    def keyed(self, value: Mapping[str, object], param: str) -> Iterator[tuple[str, object]]:
        """The items of an object, keys masked unless templates look them up."""
        for key, item in value.items():
            yield key if key in _SCHEMA_KEYS else self.text(str(key), param), item

    def tool(self, tool: Mapping[str, object], param: str) -> MaskedTool:
        """A tool's definition, masked.

        Raises:
            FrontendError: it is nested deeper than MAX_DEPTH, or holds text that is not Unicode.
        """
        _check_depth(tool, param)
        return MaskedTool(tool, self, param)

    def _core(self, text: str) -> str:
        return text.strip() if self._keep_space else text

    def _placeholder(self, core: str) -> str:
        index = self._index.get(core)
        if index is None:
            index = self._index[core] = len(self.texts)
            self.texts.append(core)
        return self._placeholders.of(index)

    def _armoured(self, core: str) -> str:
        """The text itself, with placeholders where it holds, ends or begins like a structural token."""
        head = max((_overlap(token, core) for token in self._specials), default=0)
        tail = max((_overlap(core, token) for token in self._specials), default=0)
        if head + tail >= len(core):
            return self._placeholder(core)
        middle = core[head : len(core) - tail]
        for token in sorted(self._specials, key=len, reverse=True):
            if token in middle:
                middle = middle.replace(token, self._placeholder(token))
        ends = [self._placeholder(end) if end else "" for end in (core[:head], core[len(core) - tail :])]
        return ends[0] + middle + ends[1]


class MaskedTool(Mapping[str, object]):
    """A tool's definition as a template sees it. Owned by the rendering of its mask.

    Written as JSON it is one placeholder; a template that looks inside finds every string masked. Most
    templates do the former, and an agent sends thousands of strings in its tools with every request.
    """

    def __init__(self, tool: Mapping[str, object], mask: Mask, param: str) -> None:
        self._tool = tool
        self._mask = mask
        self._json = mask.text(json.dumps(tool, ensure_ascii=False), param)
        self._param = param
        self._masked: dict[str, object] | None = None

    def __getitem__(self, key: str) -> object:
        return self._fields()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields())

    def __len__(self) -> int:
        return len(self._tool)

    def _as_json(self) -> str:
        return self._json

    def _fields(self) -> dict[str, object]:
        if self._masked is None:
            self._masked = {
                key: self._mask.value(item, self._param)
                for key, item in self._mask.keyed(self._tool, self._param)
            }
        return self._masked


def _fields_of(value: object) -> object:
    """What JSON makes of a tool inside another value."""
    if isinstance(value, MaskedTool):
        return value._fields()
    raise TypeError(f"tojson: {type(value).__name__} has no JSON form")


def _check_depth(value: object, param: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return
        level = inner
    raise FrontendError(param, f"nested deeper than {MAX_DEPTH} levels")


def _overlap(left: str, right: str) -> int:
    """Length of the longest end of `left` that is a beginning of `right`."""
    longest = min(len(left), len(right))
    return next((k for k in range(longest, 0, -1) if left.endswith(right[:k])), 0)

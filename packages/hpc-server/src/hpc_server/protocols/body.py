"""Bytes to one JSON object, strictly: what two parsers could read differently is refused."""

from __future__ import annotations

import json
import math
from typing import NoReturn

from hpc_server.limits import MAX_JSON_DEPTH
from hpc_server.protocols.errors import RequestError, not_valid

__all__ = ["parse_body"]


def parse_body(data: bytes) -> dict[str, object]:
    """The object that a request body holds.

    Raises RequestError (400) for invalid UTF-8, lone surrogates, duplicate keys, NaN or infinite numbers,
    integers too long to read, nesting beyond MAX_JSON_DEPTH, and anything that is not one JSON object.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refuse(f"the body is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _refuse(f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise _refuse(f"the body nests deeper than {MAX_JSON_DEPTH} levels") from error
    except ValueError as error:  # an integer beyond the interpreter's digit limit
        raise _refuse("the body holds an integer with too many digits") from error
    if not isinstance(value, dict):
        raise _refuse("the body must be a JSON object")
    _check(value)
    return value


def _refuse(message: str) -> RequestError:
    return not_valid(None, message, code="invalid_json")


def _no_constant(name: str) -> NoReturn:
    raise _refuse(f"the body holds {name}, which is not JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _refuse(f"the body has the key {key[:64]!r} twice in one object")
            seen.add(key)
    return value


def _check(root: object) -> None:
    """Depth, surrogates and overflowed floats (1e999 reads as infinity); without recursion."""
    level: list[object] = [root]
    for _ in range(MAX_JSON_DEPTH + 1):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value)
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str):
                _check_text(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise _refuse("the body holds a number beyond the range of a double")
        if not below:
            return
        level = below
    raise _refuse(f"the body nests deeper than {MAX_JSON_DEPTH} levels")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _refuse(
            f"the body has a lone surrogate, U+{ord(text[error.start]):04X}, in a string"
        ) from error

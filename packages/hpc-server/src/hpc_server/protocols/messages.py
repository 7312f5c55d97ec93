"""Chat messages and tools as the renderer takes them: checked, reduced to the fields that have a meaning.

Text parts of one message are joined as they are, `developer` is `system`, and `reasoning` is
`reasoning_content` (clients send either, some both).
"""

from __future__ import annotations

from collections.abc import Mapping

from hpc_server import limits
from hpc_server.protocols.errors import not_valid
from hpc_server.protocols.fields import Fields, Use, shown, unknown_fields

__all__ = ["Unknown", "read_messages", "read_tools"]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MESSAGE_FIELDS: Mapping[str, Use] = {
    "role": Use.USED,
    "content": Use.USED,
    "reasoning_content": Use.USED,
    "reasoning": Use.USED,
    "tool_calls": Use.USED,
    "tool_call_id": Use.USED,
    "name": Use.ACCEPTED,
    "refusal": Use.IGNORED,
    "annotations": Use.IGNORED,
    "audio": Use.IGNORED,
    "function_call": Use.IGNORED,
}
_PART_FIELDS: Mapping[str, Use] = {
    "type": Use.USED,
    "text": Use.USED,
    "prompt_cache_breakpoint": Use.IGNORED,
    "cache_control": Use.IGNORED,
}
_MAX_ITEMS = 1 << 20


class Unknown:
    """Collects unknown fields below the top level, under names without indices."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._names: dict[str, None] = {}

    def check(self, body: Mapping[str, object], table: Mapping[str, Use], prefix: str) -> None:
        """Note what the table lacks. Raises RequestError if strict."""
        for name in unknown_fields(body, table, strict=self._strict, prefix=prefix):
            self._names[name] = None

    @property
    def names(self) -> tuple[str, ...]:
        """What was found, each once."""
        return tuple(self._names)


def read_messages(value: object, unknown: Unknown) -> list[dict[str, object]]:
    """Messages for `Frontend.chat`. Raises RequestError, naming the message and field."""
    if not isinstance(value, list) or not value:
        raise not_valid("messages", f"is {shown(value)}; it must be a list of at least one message")
    return [_message(message, f"messages[{i}]", unknown) for i, message in enumerate(value)]


def _message(value: object, at: str, unknown: Unknown) -> dict[str, object]:
    if not isinstance(value, dict):
        raise not_valid(at, f"is {shown(value)}; it must be an object")
    unknown.check(value, _MESSAGE_FIELDS, "messages.")
    fields = Fields(value, f"{at}.")
    role = fields.choice("role", _ROLES)
    if role is None:
        raise fields.error("role", "one of " + ", ".join(sorted(_ROLES)))
    message: dict[str, object] = {"role": _ROLES[role]}
    if role == "assistant":
        message["content"] = "" if not fields.has("content") else _content(value["content"], at, unknown)
        reasoning = fields.string("reasoning_content", _MAX_CHARS)
        other = fields.string("reasoning", _MAX_CHARS)
        if reasoning is not None or other is not None:
            message["reasoning_content"] = reasoning if reasoning is not None else other
        calls = fields.array("tool_calls", _MAX_ITEMS)
        if calls:
            message["tool_calls"] = [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
        return message
    if not fields.has("content"):
        raise fields.error("content", "a string or a list of text parts")
    message["content"] = _content(value["content"], at, unknown)
    if role == "tool":
        call_id = fields.string("tool_call_id", limits.MAX_NAME_CHARS)
        if call_id is not None:
            message["tool_call_id"] = call_id
    return message


_MAX_CHARS = 1 << 32
"""Texts are bounded by the body's size and by the context, not each by itself."""


def _content(value: object, at: str, unknown: Unknown) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise not_valid(f"{at}.content", f"is {shown(value)}; it must be a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(value):
        where = f"{at}.content[{i}]"
        if not isinstance(part, dict):
            raise not_valid(where, f"is {shown(part)}; it must be an object")
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise not_valid(f"{where}.type", f"is {shown(kind)}; only text parts are supported")
        if not isinstance(text, str):
            raise not_valid(f"{where}.text", f"is {shown(text)}; it must be a string")
        unknown.check(part, _PART_FIELDS, "messages.content.")
        texts.append(text)
    return "".join(texts)


def _call(value: object, at: str) -> dict[str, object]:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise not_valid(at, "must be an object of type function")
    function = value.get("function")
    if not isinstance(function, dict):
        raise not_valid(f"{at}.function", f"is {shown(function)}; it must be an object")
    inner = Fields(function, f"{at}.function.")
    name = inner.string("name", limits.MAX_NAME_CHARS)
    if not name:
        raise inner.error("name", "a string that is not empty")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str | dict):
        raise inner.error("arguments", "JSON text or an object")
    call: dict[str, object] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    call_id = Fields(value, f"{at}.").string("id", limits.MAX_NAME_CHARS)
    return call if call_id is None else {"id": call_id, **call}


def read_tools(fields: Fields) -> list[dict[str, object]] | None:
    """Tools to render, None if there are none or `tool_choice` rules them out. Raises RequestError."""
    choice = fields.raw("tool_choice")
    if choice is not None and choice not in ("none", "auto"):
        raise fields.error("tool_choice", "none or auto: a forced call is not supported yet")
    fields.boolean("parallel_tool_calls")
    given = fields.array("tools", _MAX_ITEMS)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given or ())]
    return tools if tools and choice != "none" else None


def _tool(value: object, at: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise not_valid(at, f"is {shown(value)}; it must be an object")
    if value.get("type") != "function":
        raise not_valid(f"{at}.type", f"is {shown(value.get('type'))}; only function tools are supported")
    function = value.get("function")
    if not isinstance(function, dict):
        raise not_valid(f"{at}.function", f"is {shown(function)}; it must be an object")
    inner = Fields(function, f"{at}.function.")
    if not inner.string("name", limits.MAX_NAME_CHARS):
        raise inner.error("name", "a string that is not empty")
    inner.string("description", _MAX_CHARS)
    inner.mapping("parameters")
    # As sent, member order included: rendering a schema otherwise would change the prompt's tokens.
    return value

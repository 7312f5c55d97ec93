"""A client's messages to what a template is given: one shape, every text masked, and what echo looks up."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import attrs

from hpc_server.echo import ReplyParts
from hpc_server.placeholders import Mask, MaskedTool
from hpc_server.text_errors import FrontendError

__all__ = ["Conversation", "normalise"]

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}


@attrs.frozen(eq=False)
class Conversation:
    """Messages and tools as a template takes them.

    messages, tools: masked. replies: what each assistant message says, in order. assistant_params: where
    each of them stands in the request. system: the placeholder of the first message's content if that is
    a system message. required: texts that a template must write out; others it may leave out.
    """

    messages: list[dict[str, object]]
    tools: list[object] | None
    replies: tuple[ReplyParts, ...]
    system: int | None
    required: frozenset[str]


def normalise(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None, mask: Mask
) -> Conversation:
    """Check messages and tools and mask them.

    Raises:
        FrontendError: a field is missing or of the wrong kind; the field is named.
    """
    if not messages:
        raise FrontendError("messages", "empty, need at least one message")
    shaped: list[dict[str, object]] = []
    replies: list[ReplyParts] = []
    required: set[str] = set()
    system: int | None = None
    masked_tools: list[object] = [_tool(tool, f"tools[{i}]", mask) for i, tool in enumerate(tools or ())]
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise FrontendError(at, f"{type(message).__name__}, need an object")
        given = message.get("role")
        role = _ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            raise FrontendError(f"{at}.role", f"{given!r}, need one of {', '.join(_ROLES)}")
        content = _content(message.get("content"), f"{at}.content", optional=role == "assistant")
        required.add(content.strip())
        made: dict[str, object] = {"role": role}
        if i == 0 and role == "system":
            made["content"], system = mask.alone(content, f"{at}.content")
        else:
            made["content"] = mask.text(content, f"{at}.content")
        if role == "assistant":
            reasoning = _reasoning(message, at)
            calls = _tool_calls(message.get("tool_calls"), f"{at}.tool_calls")
            if reasoning is not None:
                made["reasoning_content"] = mask.text(reasoning, f"{at}.reasoning_content")
            if calls:
                made["tool_calls"] = [
                    _masked_call(name, given, mask, f"{at}.tool_calls") for name, given in calls
                ]
            texts = tuple((name, json.dumps(given)) for name, given in calls)
            replies.append(ReplyParts(content=content, reasoning=reasoning or "", tool_calls=texts))
        elif role == "tool" and isinstance(message.get("tool_call_id"), str):
            made["tool_call_id"] = mask.text(str(message["tool_call_id"]), f"{at}.tool_call_id")
        if isinstance(message.get("name"), str):
            made["name"] = mask.text(str(message["name"]), f"{at}.name")
        shaped.append(made)
    return Conversation(shaped, masked_tools or None, tuple(replies), system, frozenset(required - {""}))


def _tool(value: object, at: str, mask: Mask) -> MaskedTool:
    if not isinstance(value, dict):
        raise FrontendError(at, f"{type(value).__name__}, need an object")
    return mask.tool(value, at)


def _content(value: object, at: str, *, optional: bool) -> str:
    """The text of a content; parts are joined as the published templates join them, with nothing between."""
    if isinstance(value, str):
        return value
    if value is None and optional:
        return ""
    if not isinstance(value, list):
        raise FrontendError(
            at, f"{'missing' if value is None else type(value).__name__}, need text or a list of parts"
        )
    texts: list[str] = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text"):
            raise FrontendError(f"{at}[{i}].type", f"{kind!r} is not supported, only text is")
        if not isinstance(part.get("text"), str):
            raise FrontendError(f"{at}[{i}].text", f"{type(part.get('text')).__name__}, need text")
        texts.append(part["text"])
    return "".join(texts)


def _reasoning(message: Mapping[str, object], at: str) -> str | None:
    """`reasoning_content`, or `reasoning`: clients send either, or both with the same text."""
    for field in ("reasoning_content", "reasoning"):
        value = message.get(field)
        if value is None:
            continue
        if not isinstance(value, str):
            raise FrontendError(f"{at}.{field}", f"{type(value).__name__}, need text")
        return value
    return None


def _tool_calls(value: object, at: str) -> list[tuple[str, dict[str, object]]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise FrontendError(at, f"{type(value).__name__}, need a list")
    calls: list[tuple[str, dict[str, object]]] = []
    for i, call in enumerate(value):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise FrontendError(f"{at}[{i}].function.name", "missing, need text")
        calls.append((name, _arguments(function.get("arguments"), f"{at}[{i}].function.arguments")))
    return calls


def _arguments(value: object, at: str) -> dict[str, object]:
    """Arguments as an object, keys in the client's order; they come as JSON text or as an object."""
    if isinstance(value, str):
        try:
            if value.strip():
                value = json.loads(value, parse_constant=_no_constant, parse_float=_finite)
            else:
                value = {}
        except RecursionError:
            raise FrontendError(at, "not JSON: nests too deep") from None
        except (json.JSONDecodeError, _NumberError) as error:
            raise FrontendError(at, f"not JSON: {error}") from None
        except ValueError:  # an integer beyond the interpreter's digit limit
            raise FrontendError(at, "not JSON: an integer with too many digits") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FrontendError(at, f"JSON {type(value).__name__}, need an object")
    return value


def _no_constant(name: str) -> object:
    raise _NumberError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    """A number that overflows would be rendered as `Infinity`."""
    value = float(text)
    if not math.isfinite(value):
        raise _NumberError("a number beyond the range of a double")
    return value


class _NumberError(ValueError):
    """A number that JSON or a double cannot say."""


def _masked_call(name: str, arguments: dict[str, object], mask: Mask, at: str) -> dict[str, object]:
    # Argument names are the tool author's words, not a template's: all of them are masked.
    given = {mask.text(key, at): mask.value(value, at, 1) for key, value in arguments.items()}
    return {"type": "function", "function": {"name": mask.text(name, at), "arguments": given}}

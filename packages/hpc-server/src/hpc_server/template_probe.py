"""What a chat template does, found out by rendering small conversations at start (design D23)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs

from hpc_server.frame import Cutter, Frame, Item, turns
from hpc_server.placeholders import Mask
from hpc_server.template import ChatTemplate
from hpc_server.text_errors import TemplateError

__all__ = ["TemplateProbe", "probe_template"]

_SPACE = "\n \n"
_NONE: Mapping[str, object] = MappingProxyType({})
_PRESERVE: Mapping[str, object] = MappingProxyType({"preserve_thinking": True})


@attrs.frozen
class TemplateProbe:
    """How a template writes conversations. Logged at start.

    opens, closes: the structural tokens that begin and end a turn; None where the template has no such
        turns, and then there are neither boundaries nor echo. assistant: the role that replies have.
    think, end_think: the think tokens, None where the tokenizer has none.
    thinking_switch: `enable_thinking` changes the generation opener.
    keeps_thinking: reasoning before the last user message stays with `preserve_thinking`; `by_default`:
        also without it. keeps_empty_think: so does an empty think block.
    late_system: a system message may come after others.
    tools_first: tools are written before the system text.
    trims: the kinds of text whose white space is cut at both ends.
    """

    opens: int | None
    closes: int | None
    assistant: str
    think: int | None
    end_think: int | None
    thinking_switch: bool
    keeps_thinking: bool
    keeps_thinking_by_default: bool
    keeps_empty_think: bool
    late_system: bool
    tools_first: bool
    trims: tuple[str, ...]


def probe_template(template: ChatTemplate, special_ids: Mapping[str, int]) -> TemplateProbe:
    """Render a dozen small conversations.

    Raises:
        TemplateError: the template cannot render one user message.
    """
    probe = _Probe(template, special_ids)
    think = special_ids.get("<think>")
    opens, closes, assistant = probe.turn_tokens()
    switch = {probe.opener({"enable_thinking": on}) for on in (True, False)}
    empty = probe.cut([_USER, _said("assistant", "a", reasoning_content=""), _USER], switches=_PRESERVE)
    return TemplateProbe(
        opens=opens,
        closes=closes,
        assistant=assistant,
        think=think,
        end_think=special_ids.get("</think>"),
        thinking_switch=len(switch) > 1,
        keeps_thinking=probe.keeps_thinking(_PRESERVE),
        keeps_thinking_by_default=probe.keeps_thinking(),
        keeps_empty_think=empty is not None
        and think is not None
        and think in _history(empty.items, opens, closes),
        late_system=probe.cut([_SYSTEM, _USER, _said("assistant", "a"), _SYSTEM, _USER]) is not None,
        tools_first=probe.tools_first(),
        trims=tuple(
            kind for kind in ("system", "user", "assistant", "reasoning", "tool") if probe.trims(kind)
        ),
    )


def _said(role: str, content: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


_USER = _said("user", "q")
_SYSTEM = _said("system", "s")


class _Probe:
    def __init__(self, template: ChatTemplate, special_ids: Mapping[str, int]) -> None:
        self._template = template
        self._special_ids = special_ids
        self._cutter = Cutter(template.placeholders, special_ids)
        said, other = "zq-probe " * 8, "zq-other " * 16
        if self._render([_said("user", said)]) == self._render([_said("user", other)]):
            raise TemplateError("chat template: it does not write what the user says")

    def turn_tokens(self) -> tuple[int | None, int | None, str]:
        """The opening and closing token of a turn, and the role in the generation opener."""
        opener = self._cutter.cut(self.opener(), ()).items
        reply = self.cut([_USER, _said("assistant", "zq-probe-reply"), _USER])
        if (
            reply is None
            or len(opener) < 2
            or not isinstance(opener[0], int)
            or not isinstance(opener[1], str)
        ):
            return None, None, ""
        at = next(
            (i for i, item in enumerate(reply.items) if isinstance(item, str) and "zq-probe-reply" in item),
            None,
        )
        after = [] if at is None else reply.items[at + 1 :]
        closes = next((item for item in after if isinstance(item, int)), None)
        if closes is None or closes == opener[0]:
            return None, None, ""
        return opener[0], closes, opener[1].split("\n", 1)[0].strip()

    def opener(self, switches: Mapping[str, object] = _NONE) -> str:
        """What the generation prompt adds to a conversation; nothing if it changes what lies before."""
        before = self._render([_USER], generate=False, switches=switches)
        after = self._render([_USER], switches=switches)
        return after[len(before) :] if after.startswith(before) else ""

    def keeps_thinking(self, switches: Mapping[str, object] = _NONE) -> bool:
        """Does the reasoning of an answered turn stay?"""
        frame = self.cut(
            [_USER, _said("assistant", "a", reasoning_content="zq-probe-why"), _USER], switches=switches
        )
        return frame is not None and any(
            "zq-probe-why" in item for item in frame.items if isinstance(item, str)
        )

    def tools_first(self) -> bool:
        """Are tools written before the system text?"""
        function: dict[str, object] = {"name": "zq-probe-tool", "description": "d", "parameters": {}}
        tool: dict[str, object] = {"type": "function", "function": function}
        frame = self.cut([_said("system", "zq-probe-system"), _USER], [tool])
        text = "" if frame is None else "".join(item for item in frame.items if isinstance(item, str))
        return 0 <= text.find("zq-probe-tool") < text.find("zq-probe-system")

    def trims(self, kind: str) -> bool:
        """Is white space at both ends of this kind of text cut?"""
        text = f"{_SPACE}zq-probe-text{_SPACE}"
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        messages = {
            "system": [_said("system", text), _USER],
            "user": [_said("user", text)],
            "assistant": [_USER, _said("assistant", text), _USER],
            "reasoning": [_USER, _said("assistant", "a", reasoning_content=text)],
            "tool": [_USER, _said("assistant", "", tool_calls=[call]), _said("tool", text)],
        }[kind]
        frame = self.cut(messages)
        if frame is None:
            return False
        whole = next(
            (item for item in frame.items if isinstance(item, str) and "zq-probe-text" in item), text
        )
        return text not in whole and " \nzq-probe-text" not in whole and "zq-probe-text\n " not in whole

    def cut(
        self,
        messages: Sequence[dict[str, object]],
        tools: list[dict[str, object]] | None = None,
        *,
        switches: Mapping[str, object] = _NONE,
    ) -> Frame | None:
        """The frame of a conversation, None where the template will not render it."""
        mask = Mask(self._template.placeholders, self._special_ids)
        masked = [{key: _masked(key, value, mask) for key, value in message.items()} for message in messages]
        masked_tools = [mask.tool(tool, "tools") for tool in tools] if tools else None
        try:
            rendered = self._template.render(masked, masked_tools, True, **switches)
        except TemplateError:
            return None
        return self._cutter.cut(rendered, mask.texts)

    def _render(
        self,
        messages: Sequence[dict[str, object]],
        *,
        generate: bool = True,
        switches: Mapping[str, object] = _NONE,
    ) -> str:
        return self._template.render(messages, None, generate, **switches)


def _masked(key: str, value: object, mask: Mask) -> object:
    return (
        mask.text(value, key) if key in ("content", "reasoning_content") and isinstance(value, str) else value
    )


def _history(items: Sequence[Item], opens: int | None, closes: int | None) -> list[Item]:
    """The items before the generation opener."""
    if opens is None or closes is None:
        return []
    found = turns(items, opens, closes)
    return list(items[: found[-1].begin]) if found else []

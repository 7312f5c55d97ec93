"""The checkpoint's own chat template, compiled once and rendered under bounds (design D23, trust T1-T2)."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_server.placeholders import Placeholders
from hpc_server.template_budget import Bounds
from hpc_server.template_sandbox import TemplateSandbox
from hpc_server.text_errors import TemplateError

__all__ = ["ChatTemplate"]

_MAX_FILE_BYTES = 1 << 24
_FRAME_CHARS = 512
"""What a template may write around one message, by which the bounds grow."""


class ChatTemplate:
    """A Jinja chat template. Immutable after construction and safe to share between threads.

    A rendering is pure: it reads no clock, no files and no random numbers. `strftime_now` is defined only
    if a date was given, and always tells that date: a prompt that changes at midnight would make every
    cached prefix useless once a day. Templates that test for it have a fixed date of their own.

    placeholders: what messages are masked with before they are rendered (D22).
    """

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, object] | None = None,
        date: datetime.date | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        """source: the template's text. variables: seen by every rendering (`bos_token` …). date: today.

        Raises:
            TemplateError: the template is refused (see `TemplateSandbox.prepare`).
        """
        self.placeholders = Placeholders()
        self._sandbox = TemplateSandbox(bounds)
        self._sandbox.add_filter("tojson", self.placeholders.tojson)
        self._variables = dict(variables or {}, raise_exception=_refuse)
        if date is not None:
            self._variables["strftime_now"] = _clock(date)
        self._template = self._sandbox.prepare(source)

    @classmethod
    def load(cls, folder: Path, *, date: datetime.date | None = None) -> ChatTemplate:
        """Read `chat_template.jinja` of a model folder, or else `chat_template` of tokenizer_config.json.

        A list of named templates gives the one named `default`.

        Raises:
            TemplateError: there is none, or it is refused.
        """
        config = _config(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = _text(file) if file.exists() else _source(config.get("chat_template"))
        if source is None:
            raise TemplateError(
                f"{folder}: neither chat_template.jinja nor a chat_template in tokenizer_config.json"
            )
        return cls(source, variables=_token_names(config), date=date)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None,
        add_generation_prompt: bool,
        **kwargs: object,
    ) -> str:
        """The frame's text for messages and tools as the template expects them, masked or not.

        The bounds grow with the messages and the text in them.

        Raises:
            TemplateError: `refusal` if the template raised; otherwise it failed or was stopped, within
                2 seconds.
        """
        variables = dict(self._variables, **kwargs)
        variables.update(messages=list(messages), add_generation_prompt=add_generation_prompt)
        variables["tools"] = list(tools) if tools else None
        texts = (text for message in messages for text in message.values() if isinstance(text, str))
        chars = sum(map(len, texts)) + _FRAME_CHARS * len(messages)
        return self._sandbox.run(self._template, variables, extra_chars=chars)


def _refuse(message: object = "") -> str:
    raise TemplateError(f"the chat template refuses: {str(message)[:500]}", refusal=True)


def _clock(date: datetime.date) -> Callable[[str], str]:
    """`strftime_now` at a fixed date."""

    def strftime_now(form: str) -> str:
        if len(form) > 64 or re.search(r"%[^A-Za-z%]", form):
            raise TemplateError(f"chat template: strftime_now({form[:64]!r}) is not a plain format")
        return date.strftime(form)

    return strftime_now


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise TemplateError(f"{file}: {file.stat().st_size} bytes, at most {_MAX_FILE_BYTES}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{file}: cannot be read: {error}") from error


def _config(file: Path) -> dict[str, object]:
    if not file.exists():
        return {}
    try:
        config = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise TemplateError(f"{file}: holds {type(config).__name__}, not an object")
    return config


def _source(value: object) -> str | None:
    if isinstance(value, str):
        return value
    named = value if isinstance(value, list) else []
    for entry in named:
        if (
            isinstance(entry, dict)
            and entry.get("name") == "default"
            and isinstance(entry.get("template"), str)
        ):
            return str(entry["template"])
    return None


def _token_names(config: Mapping[str, object]) -> dict[str, object]:
    names: dict[str, object] = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            names[key] = text
    return names

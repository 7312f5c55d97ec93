"""POST /v1/chat/completions: its fields, and its answers whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from hpc_server import limits
from hpc_server.events import FinishReason, TextDelta
from hpc_server.protocols.answer import Envelope, Piece, clamp_logprob, token_text
from hpc_server.protocols.common import COMMON_FIELDS, Common, ModelLimits, read_common
from hpc_server.protocols.errors import not_valid
from hpc_server.protocols.fields import Fields, Use, shown
from hpc_server.protocols.messages import Unknown, read_messages, read_tools

__all__ = ["FIELDS", "ChatAnswer", "ChatRequest", "read_chat"]

FIELDS: Mapping[str, Use] = {
    **COMMON_FIELDS,
    "messages": Use.USED,
    "max_completion_tokens": Use.USED,
    "top_logprobs": Use.USED,
    "chat_template_kwargs": Use.USED,
    "reasoning_effort": Use.USED,
    "tools": Use.USED,
    "tool_choice": Use.USED,
    "parallel_tool_calls": Use.ACCEPTED,
    "response_format": Use.ACCEPTED,
    "modalities": Use.ACCEPTED,
    "verbosity": Use.IGNORED,
    "store": Use.IGNORED,
    "metadata": Use.IGNORED,
    "service_tier": Use.IGNORED,
    "safety_identifier": Use.IGNORED,
    "moderation": Use.IGNORED,
    "prediction": Use.IGNORED,
    "web_search_options": Use.IGNORED,
    "prompt_cache_key": Use.IGNORED,
    "prompt_cache_retention": Use.IGNORED,
    "prompt_cache_options": Use.IGNORED,
}

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@attrs.frozen
class ChatRequest:
    """A checked request. kwargs: for the chat template, `reasoning_effort` folded in."""

    common: Common
    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None
    kwargs: Mapping[str, object]


def read_chat(body: Mapping[str, object], model: ModelLimits, *, strict: bool) -> ChatRequest:
    """Check a body. Raises RequestError with field, value and bound."""
    fields = Fields(body)
    unknown = Unknown(strict)
    unknown.check(body, FIELDS, "")
    messages = read_messages(body.get("messages"), unknown)
    return ChatRequest(
        common=read_common(
            fields,
            model,
            max_new_names=("max_completion_tokens", "max_tokens"),
            logprobs=_logprobs(fields),
            unknown=unknown.names,
        ),
        messages=messages,
        tools=read_tools(fields),
        kwargs=_template_kwargs(fields),
    )


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, limits.MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise fields.error("top_logprobs", "0 or absent unless logprobs is true")
    return (top or 0) if wanted else None


def _template_kwargs(fields: Fields) -> Mapping[str, object]:
    effort = fields.choice("reasoning_effort", _EFFORTS)
    form = fields.mapping("response_format")
    if form is not None and form.get("type") != "text":
        kind = shown(form.get("type"))
        raise not_valid("response_format.type", f"is {kind}; only text is supported for now")
    modalities = fields.array("modalities", 8)
    if modalities is not None and modalities != ["text"]:
        raise fields.error("modalities", '["text"]')
    kwargs = dict(fields.mapping("chat_template_kwargs") or {})
    if effort == "none":
        kwargs.setdefault("enable_thinking", False)
    return kwargs


class ChatAnswer:
    """Writes `chat.completion` and `chat.completion.chunk` objects."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._common = envelope.common

    def opening(self) -> list[Mapping[str, object]]:
        """The role, and the prompt's ids if asked for."""
        chunk = self._chunk({"role": "assistant", "content": ""}, Piece())
        if self._common.return_token_ids:
            chunk["prompt_token_ids"] = self._envelope.prompt.tolist()
        return [chunk]

    def chunks(self, piece: Piece) -> list[Mapping[str, object]]:
        """One chunk a delta; ids and logprobs ride on the first."""
        wanted = self._common.return_token_ids or self._common.sampling.logprobs is not None
        if not piece.deltas:
            return [self._chunk({}, piece)] if piece.ids and wanted else []
        first, *others = piece.deltas
        return [self._chunk(_delta(first), piece), *(self._chunk(_delta(d), Piece()) for d in others)]

    def closing(self, reason: FinishReason) -> list[Mapping[str, object]]:
        """The finish reason, then the usage if asked for."""
        chunks: list[Mapping[str, object]] = [self._chunk({}, Piece(), reason)]
        if self._common.include_usage:
            head = self._envelope.head("chat.completion.chunk")
            chunks.append({**head, "choices": [], "usage": self._envelope.usage()})
        return chunks

    def whole(self, pieces: list[Piece], reason: FinishReason) -> Mapping[str, object]:
        """The whole answer."""
        texts = {"content": "", "reasoning": ""}
        for kind in texts:
            texts[kind] = "".join(d.text for piece in pieces for d in piece.deltas if d.kind == kind)
        message: dict[str, object] = {"role": "assistant", "content": texts["content"]}
        if texts["reasoning"]:
            message["reasoning_content"] = message["reasoning"] = texts["reasoning"]
        choice: dict[str, object] = {
            "index": 0,
            "message": message,
            "finish_reason": reason.value,
            "logprobs": None,
        }
        if self._common.sampling.logprobs is not None:
            entries = [entry for piece in pieces for entry in self._entries(piece)]
            choice["logprobs"] = {"content": entries, "refusal": None}
        answer = {**self._envelope.head("chat.completion"), "choices": [choice]}
        if self._common.return_token_ids:
            choice["token_ids"] = [token for piece in pieces for token in piece.ids]
            answer["prompt_token_ids"] = self._envelope.prompt.tolist()
        return {**answer, "usage": self._envelope.usage()}

    def _chunk(
        self, delta: Mapping[str, object], piece: Piece, reason: FinishReason | None = None
    ) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": 0,
            "delta": delta,
            "finish_reason": None if reason is None else reason.value,
            "logprobs": None,
        }
        if piece.logprobs:
            choice["logprobs"] = {"content": self._entries(piece), "refusal": None}
        if self._common.return_token_ids:
            choice["token_ids"] = list(piece.ids)
        chunk = {**self._envelope.head("chat.completion.chunk"), "choices": [choice]}
        if self._common.continuous_usage:
            chunk["usage"] = self._envelope.usage()
        elif self._common.include_usage:
            chunk["usage"] = None
        return chunk

    def _entries(self, piece: Piece) -> list[dict[str, object]]:
        return [
            {**self._entry(token, one.chosen), "top_logprobs": [self._entry(*pair) for pair in one.top]}
            for token, one in zip(piece.shown, piece.logprobs, strict=True)
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        tokens = self._envelope.tokens
        return {
            "token": token_text(tokens, token),
            "logprob": clamp_logprob(logprob),
            "bytes": list(tokens.token_bytes(token)),
        }


def _delta(delta: TextDelta) -> Mapping[str, object]:
    if delta.kind == "reasoning":
        # Clients read one name or the other.
        return {"reasoning_content": delta.text, "reasoning": delta.text}
    return {"content": delta.text}

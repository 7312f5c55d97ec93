"""POST /v1/completions: its fields, and its answers whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from hpc_index.ids import Int32Buffer
from hpc_server import limits
from hpc_server.events import FinishReason
from hpc_server.protocols.answer import Envelope, Piece, clamp_logprob, token_text
from hpc_server.protocols.common import COMMON_FIELDS, Common, ModelLimits, read_common
from hpc_server.protocols.errors import not_valid
from hpc_server.protocols.fields import Fields, Use, shown, unknown_fields

__all__ = ["FIELDS", "CompletionAnswer", "CompletionRequest", "read_completion"]

FIELDS: Mapping[str, Use] = {
    **COMMON_FIELDS,
    "prompt": Use.USED,
    "echo": Use.ACCEPTED,
    "best_of": Use.ACCEPTED,
    "suffix": Use.ACCEPTED,
}


@attrs.frozen(eq=False)
class CompletionRequest:
    """A checked request. prompt: text, or ids as int32 [n]."""

    common: Common
    prompt: str | Int32Buffer


def read_completion(body: Mapping[str, object], model: ModelLimits, *, strict: bool) -> CompletionRequest:
    """Check a body. Raises RequestError with field, value and bound."""
    fields = Fields(body)
    unknown = unknown_fields(body, FIELDS, strict=strict)
    if fields.boolean("echo"):
        raise fields.error("echo", "false: the prompt is not repeated")
    if fields.integer("best_of", 1, 1 << 20) not in (None, 1):
        raise fields.error("best_of", "1")
    if fields.string("suffix", 1 << 32):
        raise fields.error("suffix", "absent: there is no insertion mode")
    return CompletionRequest(
        common=read_common(
            fields,
            model,
            max_new_names=("max_tokens",),
            logprobs=fields.integer("logprobs", 0, limits.MAX_TOP_LOGPROBS),
            unknown=unknown,
        ),
        prompt=_prompt(body.get("prompt"), model, "prompt"),
    )


def _prompt(value: object, model: ModelLimits, at: str) -> str | Int32Buffer:
    """One prompt: text, ids, or a list of one of these."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise not_valid(at, f"is {shown(value)}; it must be a string or a list of token ids")
    if any(isinstance(item, str | list) for item in value):
        if len(value) != 1 or at != "prompt":
            raise not_valid(at, f"is {shown(value)}; one prompt per request")
        return _prompt(value[0], model, "prompt[0]")
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < model.vocab_size:
            bound = f"a token id in [0, {model.vocab_size})"
            raise not_valid(f"{at}[{i}]", f"is {shown(token)}; it must be {bound}")
    return np.array(value, dtype=np.int32)


class CompletionAnswer:
    """Writes `text_completion` objects, whole or as chunks."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._common = envelope.common
        self._offset = 0

    def opening(self) -> list[Mapping[str, object]]:
        """The prompt's ids if asked for."""
        if not self._common.return_token_ids:
            return []
        return [{**self._chunk("", Piece()), "prompt_token_ids": self._envelope.prompt.tolist()}]

    def chunks(self, piece: Piece) -> list[Mapping[str, object]]:
        """One chunk a piece."""
        text = "".join(delta.text for delta in piece.deltas)
        wanted = self._common.return_token_ids or self._common.sampling.logprobs is not None
        return [self._chunk(text, piece)] if text or (piece.ids and wanted) else []

    def closing(self, reason: FinishReason) -> list[Mapping[str, object]]:
        """The finish reason, then the usage if asked for."""
        chunks: list[Mapping[str, object]] = [self._chunk("", Piece(), reason)]
        if self._common.include_usage:
            head = self._envelope.head("text_completion")
            chunks.append({**head, "choices": [], "usage": self._envelope.usage()})
        return chunks

    def whole(self, pieces: list[Piece], reason: FinishReason) -> Mapping[str, object]:
        """The whole answer."""
        merged = Piece(
            ids=tuple(token for piece in pieces for token in piece.ids),
            shown=tuple(token for piece in pieces for token in piece.shown),
            logprobs=tuple(one for piece in pieces for one in piece.logprobs),
        )
        text = "".join(delta.text for piece in pieces for delta in piece.deltas)
        answer = {
            **self._envelope.head("text_completion"),
            "choices": [self._choice(text, merged, reason)],
            "usage": self._envelope.usage(),
        }
        if self._common.return_token_ids:
            answer["prompt_token_ids"] = self._envelope.prompt.tolist()
        return answer

    def _chunk(self, text: str, piece: Piece, reason: FinishReason | None = None) -> dict[str, object]:
        chunk = {**self._envelope.head("text_completion"), "choices": [self._choice(text, piece, reason)]}
        if self._common.continuous_usage:
            chunk["usage"] = self._envelope.usage()
        elif self._common.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, text: str, piece: Piece, reason: FinishReason | None) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": 0,
            "text": text,
            "finish_reason": None if reason is None else reason.value,
            "logprobs": self._logprobs(piece) if piece.logprobs else None,
        }
        if self._common.return_token_ids:
            choice["token_ids"] = list(piece.ids)
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, object]:
        tokens = self._envelope.tokens
        texts = [token_text(tokens, token) for token in piece.shown]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [clamp_logprob(one.chosen) for one in piece.logprobs],
            "top_logprobs": [
                {token_text(tokens, token): clamp_logprob(value) for token, value in one.top}
                for one in piece.logprobs
            ],
            "text_offset": offsets,
        }

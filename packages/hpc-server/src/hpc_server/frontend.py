"""Requests to prompts: rendering, token-exact echo, tokens and tap hints (design D21-D23, §7.1, §8.3)."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from hpc_index.ids import Int32Buffer
from hpc_index.records import HintKind, PromptView, TapHint
from hpc_server.assembly import Assembly
from hpc_server.chat_messages import Conversation, normalise
from hpc_server.echo import EchoContext, EchoStore, ReplyParts
from hpc_server.frame import Cutter, Frame
from hpc_server.output import OutputStream
from hpc_server.placeholders import Mask
from hpc_server.template import ChatTemplate
from hpc_server.template_probe import TemplateProbe, probe_template
from hpc_server.text_cache import TextCache
from hpc_server.text_errors import EncodingError, FrontendError, PromptTooLongError, TemplateError
from hpc_server.tokenizer import Tokenizer

__all__ = ["TEMPLATE_KWARGS", "Frontend", "Prepared"]

TEMPLATE_KWARGS = ("enable_thinking", "preserve_thinking")
"""What a client may pass to the template; all are switches."""

RAW_HINT_TOKENS = 512
"""Raw prompts from this length on are tapped one token before their end, for a repeated one."""

MIB = 1 << 20


@attrs.frozen(eq=False)
class Prepared:
    """A prompt, ready to be quoted.

    starts_in_reasoning: the generation opener left a think block open.
    chat: the reply has turns and thinking; False for a raw completion.
    echo: what to record when the reply is complete, None where nothing is recorded.
    template_ms, tokenize_ms: time taken; the latter includes echo.
    """

    prompt: PromptView
    starts_in_reasoning: bool = False
    chat: bool = True
    echo: EchoContext | None = None
    template_ms: float = 0.0
    tokenize_ms: float = 0.0


class Frontend:
    """The text side of a server. Every method may be called from any thread; none waits for the model.

    `chat` may take up to 2 seconds under a hostile template, so call it off the event loop.

    tokenizer, template: as given. probe: what the template was found to do.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        echo_bytes: int = 64 * MIB,
        text_cache_bytes: int = 64 * MIB,
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """vocab_size: bound of ids in raw prompts, by default the tokenizer's.

        Raises:
            TemplateError: the template cannot render one user message, or leaves its text out.
        """
        self.tokenizer = tokenizer
        self.template = template
        self.probe: TemplateProbe = probe_template(template, tokenizer.special_ids)
        logging.getLogger(__name__).debug("chat template: %s", self.probe)
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._clock = clock
        self._cutter = Cutter(template.placeholders, tokenizer.special_ids)
        self._echo = EchoStore(echo_bytes)
        self._texts = TextCache(tokenizer.encode_text, text_cache_bytes)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        kwargs: Mapping[str, object] | None = None,
        cache_salt: bytes = b"",
        cacheable: bool = True,
        max_tokens: int | None = None,
    ) -> Prepared:
        """Render a conversation with its generation opener.

        Assistant messages that say what a kept reply said become the generated ids (D21). kwargs: of
        TEMPLATE_KWARGS; `preserve_thinking` is on unless switched off (D23). max_tokens: a longer prompt
        is not worth finishing.

        Raises:
            PromptTooLongError: it has more than max_tokens.
            FrontendError: a field is not valid, or the template refuses the conversation.
        """
        began = self._clock()
        options = {"preserve_thinking": True} | _options(kwargs or {})
        conversation, frame = self._render(messages, tools, options)
        rendered = self._clock()
        assembly = Assembly(
            frame,
            conversation,
            probe=self.probe,
            texts=self._texts,
            echo=self._echo,
            salt=cache_salt,
            cacheable=cacheable,
            preserve=bool(options["preserve_thinking"]),
            exceeds=self.tokenizer.exceeds,
            max_tokens=max_tokens,
        )
        try:
            assembly.run()
        except EncodingError as error:
            raise FrontendError("messages", str(error)) from error
        prompt = PromptView(
            tokens=assembly.tokens(), cache_salt=cache_salt, hints=tuple(assembly.hints), cacheable=cacheable
        )
        self._count(assembly.counts)
        return Prepared(
            prompt=prompt,
            starts_in_reasoning=assembly.starts_in_reasoning,
            echo=assembly.context(prompt.tokens),
            template_ms=(rendered - began) * 1e3,
            tokenize_ms=(self._clock() - rendered) * 1e3,
        )

    def completion(
        self,
        prompt: str | Sequence[int] | Int32Buffer,
        *,
        cache_salt: bytes = b"",
        cacheable: bool = True,
        max_tokens: int | None = None,
    ) -> Prepared:
        """A raw prompt, text or ids. Text is text here too (`Tokenizer.encode_raw`).

        max_tokens: as in `chat`.

        Raises:
            PromptTooLongError: text of far more than max_tokens.
            FrontendError: an empty prompt, text that is not Unicode, or an id outside the vocabulary.
        """
        began = self._clock()
        tokens = (
            self._raw_text(prompt, cache_salt, cacheable, max_tokens)
            if isinstance(prompt, str)
            else self._raw_ids(prompt)
        )
        if not len(tokens):
            raise FrontendError("prompt", "empty, need at least one token")
        hints: tuple[TapHint, ...] = ()
        if len(tokens) >= RAW_HINT_TOKENS:
            hints = (TapHint(len(tokens) - 1, HintKind.OPENER),)
            self._count({"hints.opener": 1})
        view = PromptView(tokens=tokens, cache_salt=cache_salt, hints=hints, cacheable=cacheable)
        return Prepared(prompt=view, chat=False, tokenize_ms=(self._clock() - began) * 1e3)

    def output(
        self, prepared: Prepared, stops: tuple[str, ...] = (), *, skip_special: bool = True
    ) -> OutputStream:
        """What turns the reply's ids into text.

        Raises:
            FrontendError: `stops` are not valid.
        """
        return OutputStream(
            self.tokenizer,
            starts_in_reasoning=prepared.starts_in_reasoning,
            stops=stops,
            parse_thinking=prepared.chat,
            skip_special=skip_special,
        )

    def record_reply(
        self, prepared: Prepared, token_ids: Sequence[int] | Int32Buffer, parts: ReplyParts
    ) -> None:
        """Keep the ids of a reply that ended, stop token included, for the client to send back.

        Of a reply that a stop string cut, the ids that the client saw in full are kept, then the shown
        part of the next one encoded anew: history says what the client was told.
        """
        if prepared.echo is None:
            return
        ids = np.array(token_ids, dtype=np.int32)
        if parts.kept is not None:
            self._count({"echo_store.stop_cut": 1})
            ids = np.concatenate([ids[: parts.kept], self.tokenizer.encode_text(parts.remainder)])
        self._echo.put(prepared.echo, ids, parts)

    def counters(self) -> Mapping[str, int]:
        """Monotonic counters by name, with a reason after a dot; names in `.bytes` are gauges.

        `echo_hit`, `echo_miss.REASON`, `placeholder.REASON`, `template.REASON`, `hints.KIND`,
        `echo_store.*`, `text_cache.*`.
        """
        with self._lock:
            own = dict(self._counts)
        for name, value in (*self._echo.counters().items(), *self._texts.counters().items()):
            own[name] = own.get(name, 0) + value
        return own

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        options: Mapping[str, object],
    ) -> tuple[Conversation, Frame]:
        placeholders = self.template.placeholders
        specials = self.tokenizer.special_ids
        mask = Mask(placeholders, specials)
        conversation = normalise(messages, tools, mask)
        rendered = self._run_template(conversation, options)
        frame = self._cutter.cut(rendered, mask.texts, conversation.system)
        missing = {text for i, text in enumerate(mask.texts) if i not in frame.seen}
        altered = placeholders.damaged(rendered)
        if not altered and conversation.required.isdisjoint(missing):
            return conversation, frame
        # The template works on the text itself: let it see the text, and mask only what could be structure.
        self._count({"placeholder.altered" if altered else "placeholder.missing": 1})
        mask = Mask(placeholders, specials, plain=missing or mask.texts)
        conversation = normalise(messages, tools, mask)
        rendered = self._run_template(conversation, options)
        plain = self._cutter.cut(rendered, mask.texts, conversation.system)
        if placeholders.damaged(rendered, missing or mask.texts) or plain.structure() != frame.structure():
            self._count({"placeholder.lost": 1})
            raise FrontendError("messages", "the chat template takes special-token text in a message apart")
        return conversation, plain

    def _run_template(self, conversation: Conversation, options: Mapping[str, object]) -> str:
        try:
            return self.template.render(conversation.messages, conversation.tools, True, **options)
        except TemplateError as error:
            self._count({"template.refused" if error.refusal else "template.failed": 1})
            raise FrontendError("messages", self.template.placeholders.without(str(error))) from error

    def _raw_text(self, prompt: str, salt: bytes, cacheable: bool, max_tokens: int | None) -> Int32Buffer:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise FrontendError("prompt", f"not valid Unicode at character {error.start}") from None
        try:
            if max_tokens is not None and self.tokenizer.exceeds(prompt, max_tokens):
                raise PromptTooLongError("prompt", max_tokens)
            return self._texts.encode(prompt, salt, keep=cacheable)
        except EncodingError as error:
            raise FrontendError("prompt", str(error)) from error

    def _raw_ids(self, prompt: Sequence[int] | Int32Buffer) -> Int32Buffer:
        try:
            ids = np.asarray(prompt)
        except (ValueError, OverflowError) as error:
            raise FrontendError("prompt", f"not a list of token ids: {error}") from None
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise FrontendError("prompt", "need a flat list of token ids")
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab_size):
            bad = int(ids.min() if ids.min() < 0 else ids.max())
            raise FrontendError("prompt", f"token id {bad}, need 0 to {self._vocab_size - 1}")
        return np.ascontiguousarray(ids, dtype=np.int32)

    def _count(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._counts.update(counts)


def _options(kwargs: Mapping[str, object]) -> dict[str, object]:
    """The template's switches; None is as good as absent."""
    for name, value in kwargs.items():
        if name not in TEMPLATE_KWARGS:
            raise FrontendError(
                f"chat_template_kwargs.{name[:64]}", f"unknown, known are {', '.join(TEMPLATE_KWARGS)}"
            )
        if value is not None and not isinstance(value, bool):
            raise FrontendError(f"chat_template_kwargs.{name}", f"{value!r:.64}, need true or false")
    return {name: value for name, value in kwargs.items() if value is not None}

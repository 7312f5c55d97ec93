"""The bundled model's tokenizer and template under the frontend: its conversations only ever grow."""

from __future__ import annotations

import functools
import random
import time

import pytest

from hpc_index.records import HintKind
from hpc_qwen35.bundled import tiny_folder
from hpc_server.frontend import Frontend
from hpc_server.template import ChatTemplate
from hpc_server.tokenizer import Tokenizer


@functools.cache
def parts() -> tuple[Tokenizer, ChatTemplate]:
    folder = tiny_folder()
    return Tokenizer.load(folder), ChatTemplate.load(folder)


@pytest.fixture
def frontend() -> Frontend:
    return Frontend(*parts())


def test_the_template_keeps_what_reuse_needs(frontend: Frontend) -> None:
    """The probe finds turns, a thinking switch, think blocks kept in history, and late system messages."""
    probe = frontend.probe
    assert frontend.tokenizer.special_ids["<|im_end|>"] in frontend.tokenizer.eos_ids
    assert (probe.opens, probe.closes) == tuple(
        map(frontend.tokenizer.special_ids.get, ("<|im_start|>", "<|im_end|>"))
    )
    assert all((probe.thinking_switch, probe.keeps_thinking, probe.keeps_empty_think, probe.late_system))
    assert probe.tools_first


@pytest.mark.parametrize("thinking", [True, False])
def test_a_conversation_extends_itself(frontend: Frontend, thinking: bool) -> None:
    """Six turns of arbitrary ids: each prompt begins with the one before and its reply, token for token."""
    random_ids = random.Random(7)
    vocab = frontend.tokenizer.vocab_size
    messages: list[dict[str, object]] = [{"role": "system", "content": "Be brief. " * 40}]
    expected: list[int] = []
    for turn in range(6):
        messages.append({"role": "user", "content": f"Question {turn} <|im_end|> of six?"})
        prepared = frontend.chat(messages, kwargs={"enable_thinking": thinking})
        tokens = prepared.prompt.tokens.tolist()
        assert tokens[: len(expected)] == expected
        reply = [random_ids.randrange(vocab) for _ in range(70)]
        out = frontend.output(prepared)
        out.feed(reply)
        out.finish()
        frontend.record_reply(prepared, reply, out.parts())
        messages.append({"role": "assistant", "content": out.text, "reasoning_content": out.reasoning})
        expected = tokens + reply
    assert frontend.counters()["echo_hit"] == 15


def test_conversations_share_the_system_block(frontend: Frontend) -> None:
    """Two conversations with one system text have a tap hint where that block ends."""
    system = {"role": "system", "content": "Be brief. " * 40}
    made = [frontend.chat([system, {"role": "user", "content": text}]) for text in ("one", "two three")]
    ends = [{h.position for h in p.prompt.hints if h.kind is HintKind.STRUCTURAL} for p in made]
    [end] = ends[0] & ends[1]
    assert made[0].prompt.tokens[:end].tolist() == made[1].prompt.tokens[:end].tolist()
    assert frontend.tokenizer.decode(made[0].prompt.tokens[:end], skip_special=False).endswith("<|im_end|>\n")


def test_a_growing_conversation_is_prepared_quickly(frontend: Frontend) -> None:
    """Six turns of 3,000 tokens and more: the last is prepared within 8 ms, since little of it is new."""
    messages = [{"role": "system", "content": "Read the files with care and answer. " * 380}]
    for turn in range(6):
        messages.append({"role": "user", "content": f"Question {turn}: " + "what does this part do? " * 30})
        frontend.chat(messages)
        messages.append({"role": "assistant", "content": f"Answer {turn}: " + "it keeps the state. " * 10})
    taken = []
    for attempt in range(5):
        began = time.perf_counter()
        prepared = frontend.chat([*messages, {"role": "user", "content": f"And {attempt}?"}])
        taken.append(time.perf_counter() - began)
    assert len(prepared.prompt.tokens) > 3000
    assert min(taken) < 0.008

"""The store of kept replies, and the prefix property that it is for (design D21)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_index.ids import Int32Buffer
from hpc_server.echo import EchoContext, EchoStore, Kept, ReplyParts
from hpc_server.frontend import Frontend, Prepared
from tests.server import texts

IM_END = texts.special("<|im_end|>")
END_THINK = texts.special("</think>")
USER = {"role": "user", "content": "hello world"}
NEXT = {"role": "user", "content": "and then?"}


def context(prompt: bytes = b"p", salt: bytes = b"") -> EchoContext:
    return EchoContext(prompt=prompt, opener=np.array([1, 2], dtype=np.int32), salt=salt)


def ids(*values: int) -> Int32Buffer:
    return np.array(values, dtype=np.int32)


def test_the_answer_to_the_same_prompt_is_preferred() -> None:
    """Of replies that say the same, the one that answered this prompt is found, else the latest."""
    store = EchoStore(1 << 20)
    said = ReplyParts("yes")
    for i, prompt in enumerate((b"a", b"b", b"c")):
        store.put(context(prompt), ids(i), said)
    found = [store.find(b"", prompt, said) for prompt in (b"a", b"b", b"x")]
    assert [kept.ids.tolist() for kept in found if isinstance(kept, Kept)] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (ReplyParts("no", "why", (("f", '{"a": 1}'),)), "content_edited"),
        (ReplyParts("yes", "", (("f", '{"a": 1}'),)), "reasoning_dropped"),
        (ReplyParts("yes", "how", (("f", '{"a": 1}'),)), "reasoning_edited"),
        (ReplyParts("yes", "why", (("f", '{"a": 2}'),)), "tool_calls_edited"),
    ],
)
def test_a_miss_says_what_differs(parts: ReplyParts, reason: str) -> None:
    """Where the prompt was answered here, a miss names the part that the client changed."""
    store = EchoStore(1 << 20)
    store.put(context(), ids(1), ReplyParts("yes", "why", (("f", '{"a": 1}'),)))
    assert store.find(b"", b"p", parts) == reason
    assert store.find(b"", b"other", parts) == "unknown"


def test_key_order_and_white_space_make_no_difference() -> None:
    """Clients parse and print arguments and trim texts: the reply is still the same."""
    store = EchoStore(1 << 20)
    store.put(context(), ids(1), ReplyParts("yes \n", "\nwhy", (("f", '{"a":1,"b":[2]}'),)))
    assert isinstance(store.find(b"", b"p", ReplyParts("yes", "why", (("f", '{"b": [2], "a": 1}'),))), Kept)


def test_namespaces_share_nothing() -> None:
    """A reply of one namespace is unknown in another, also under the same prompt (D14)."""
    store = EchoStore(1 << 20)
    store.put(context(salt=b"one"), ids(1), ReplyParts("yes"))
    assert store.find(b"two", b"q", ReplyParts("yes")) == "unknown"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 400)), max_size=30))
def test_the_store_stays_within_its_bytes(replies: list[tuple[int, int, int]]) -> None:
    """Whatever is put in, the bytes kept are within the bound and those of what can still be found."""
    store = EchoStore(6000)
    for said, prompt, size in replies:
        store.put(context(bytes([prompt])), np.zeros(size, dtype=np.int32), ReplyParts(str(said)))
    found = {
        id(kept): kept.size
        for said in range(6)
        for prompt in range(4)
        if isinstance(kept := store.find(b"", bytes([prompt]), ReplyParts(str(said))), Kept)
    }
    counters = store.counters()
    assert counters["echo_store.bytes"] == sum(found.values()) <= 6000


def test_the_least_recently_used_reply_leaves_first() -> None:
    """A reply that was found stays longer than one that was not; what is too large is not kept."""
    store = EchoStore(2 * 1100)
    store.put(context(b"a"), ids(1), ReplyParts("one"))
    store.put(context(b"b"), ids(2), ReplyParts("two"))
    store.find(b"", b"a", ReplyParts("one"))
    store.put(context(b"c"), ids(3), ReplyParts("three"))
    assert isinstance(store.find(b"", b"a", ReplyParts("one")), Kept)
    assert store.find(b"", b"b", ReplyParts("two")) == "unknown"
    store.put(context(b"d"), np.zeros(5000, dtype=np.int32), ReplyParts("large"))
    counters = store.counters()
    assert (counters["echo_store.evicted"], counters["echo_store.too_large"]) == (1, 1)


def answered(
    frontend: Frontend, prepared: Prepared, reply: list[int], stops: tuple[str, ...] = ()
) -> dict[str, object]:
    """The message that a client makes of a reply, through JSON."""
    out = frontend.output(prepared, stops)
    out.feed(reply)
    out.finish()
    frontend.record_reply(prepared, reply, out.parts())
    message = {"role": "assistant", "content": out.text}
    if out.reasoning:
        message["reasoning_content"] = out.reasoning
    echoed: dict[str, object] = json.loads(json.dumps(message))
    return echoed


REPLY = st.lists(
    st.one_of(st.integers(0, texts.tokenizer().vocab_size - 1), st.just(END_THINK), st.just(IM_END)),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(REPLY, st.booleans(), st.booleans()), min_size=1, max_size=3),
    st.sampled_from([texts.PRESERVING, texts.STRIPPING]),
)
def test_each_prompt_extends_the_one_before_and_its_reply(
    turns: list[tuple[list[int], bool, bool]], source: str
) -> None:
    """Prompt k and the generated ids are a token prefix of prompt k + 1: any ids, thinking on or off."""
    frontend = texts.frontend(source)
    messages: list[dict[str, object]] = [{"role": "system", "content": "be brief"}]
    expected: list[int] = []
    for k, (reply, thinking, ends) in enumerate(turns):
        messages.append({"role": "user", "content": f"question {k}"})
        prepared = frontend.chat(messages, kwargs={"enable_thinking": thinking})
        prompt = prepared.prompt.tokens.tolist()
        assert prompt[: len(expected)] == expected
        generated = [*reply, IM_END] if ends else reply
        messages.append(answered(frontend, prepared, generated))
        expected = prompt + generated
    final = frontend.chat([*messages, NEXT]).prompt.tokens.tolist()
    assert final[: len(expected)] == expected
    assert frontend.counters()["echo_hit"] == len(turns) * (len(turns) + 1) // 2


def test_a_turn_is_closed_once() -> None:
    """A reply with and one without its end-of-turn token are followed by the same text."""
    frontend = texts.frontend()
    tails = []
    for reply in ([65, 66], [65, 67, IM_END]):
        prepared = frontend.chat([USER])
        message = answered(frontend, prepared, [END_THINK, *reply])
        tokens = frontend.chat([USER, message, NEXT]).prompt.tokens.tolist()
        tails.append(tokens[len(prepared.prompt.tokens) + 3 :])
    assert tails[0] == tails[1]
    assert tails[0][0] == IM_END


def spoken(frontend: Frontend, text: str) -> list[int]:
    return [int(token) for token in frontend.tokenizer.encode_text(text)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reasoning_content": None}, "reasoning_dropped"),
        ({"reasoning_content": "other"}, "reasoning_edited"),
        ({"content": "other"}, "content_edited"),
    ],
)
def test_an_edited_reply_is_rendered_as_sent(change: dict[str, object], reason: str) -> None:
    """What a client changes is counted by reason, and the prompt is what the template makes of it."""
    frontend = texts.frontend()
    prepared = frontend.chat([USER])
    reply = [*spoken(frontend, "because\n"), END_THINK, *spoken(frontend, "\n\nyes"), IM_END]
    message = answered(frontend, prepared, reply) | change
    tokens = frontend.chat([USER, message, NEXT]).prompt.tokens
    assert tokens.tolist() == texts.frontend().chat([USER, message, NEXT]).prompt.tokens.tolist()
    assert frontend.counters()[f"echo_miss.{reason}"] == 1
    assert "echo_hit" not in frontend.counters()


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_under_either_name(field: str) -> None:
    """Clients send reasoning as `reasoning_content` or `reasoning`, or as both, which is not two of it."""
    frontend = texts.frontend()
    prepared = frontend.chat([USER])
    reply = [*spoken(frontend, "because\n"), END_THINK, *spoken(frontend, "\n\nyes"), IM_END]
    message = answered(frontend, prepared, reply)
    reasoning = message.pop("reasoning_content")
    frontend.chat([USER, message | {field: reasoning}, NEXT])
    frontend.chat([USER, message | {"reasoning": reasoning, "reasoning_content": reasoning}, NEXT])
    assert frontend.counters()["echo_hit"] == 2


def test_a_client_may_have_thinking_stripped() -> None:
    """With preserve_thinking off a kept think block is not brought back, and the miss says so."""
    frontend = texts.frontend()
    prepared = frontend.chat([USER])
    reply = [*spoken(frontend, "because\n"), END_THINK, *spoken(frontend, "\n\nyes"), IM_END]
    message = answered(frontend, prepared, reply)
    tokens = frontend.chat([USER, message, NEXT], kwargs={"preserve_thinking": False}).prompt.tokens
    assert "because" not in frontend.tokenizer.decode(tokens, skip_special=False)
    assert frontend.counters()["echo_miss.stripped"] == 1


def test_a_reply_cut_by_a_stop_string_keeps_what_was_shown() -> None:
    """The ids shown in full come back, then the shown part of the next; nothing of the stop string."""
    frontend = texts.frontend()
    prepared = frontend.chat([USER], kwargs={"enable_thinking": False})
    reply = [*spoken(frontend, "one two"), *spoken(frontend, " END"), *spoken(frontend, " three")]
    message = answered(frontend, prepared, reply, stops=("o END",))
    assert message["content"] == "one tw"
    tokens = frontend.chat([USER, message, NEXT]).prompt.tokens
    text = frontend.tokenizer.decode(tokens[len(prepared.prompt.tokens) :], skip_special=False)
    assert text.startswith("one tw<|im_end|>\n")
    assert frontend.counters()["echo_store.stop_cut"] == 1
    assert frontend.counters()["echo_hit"] == 1


def test_a_request_that_is_not_cacheable_leaves_nothing() -> None:
    """Without caching no reply is kept, none is used, and no text stays encoded (§7.7)."""
    frontend = texts.frontend()
    before = frontend.counters()["text_cache.bytes"]
    prepared = frontend.chat([USER], cacheable=False)
    message = answered(frontend, prepared, [65, IM_END])
    frontend.chat([USER, message, NEXT], cacheable=False)
    counters = frontend.counters()
    assert (counters["echo_store.bytes"], counters["text_cache.bytes"]) == (0, before)
    assert counters["echo_miss.not_cacheable"] == 1


def test_tool_calls_come_back_exactly() -> None:
    """A reply with tool calls is found whatever the order of its arguments, and its ids come back."""
    frontend = texts.frontend()
    prepared = frontend.chat([USER])
    reply = [70, 71, 72, END_THINK, 73, IM_END]
    calls = (("read", '{"path":"a","lines":[1,2]}'),)
    frontend.record_reply(prepared, reply, ReplyParts(content="", reasoning="r", tool_calls=calls))
    call = {"type": "function", "function": {"name": "read", "arguments": '{"lines": [1, 2], "path": "a"}'}}
    message = {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]}
    result = {"role": "tool", "content": "text", "tool_call_id": "1"}
    tokens = frontend.chat([USER, message, result]).prompt.tokens.tolist()
    expected = prepared.prompt.tokens.tolist() + reply
    assert tokens[: len(expected)] == expected

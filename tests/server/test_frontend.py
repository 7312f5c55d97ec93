"""Requests to prompts: text is never structure, hints lie where prompts diverge, errors name their field."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_index.records import HintKind
from hpc_server.frontend import RAW_HINT_TOKENS, Frontend, Prepared
from hpc_server.template import ChatTemplate
from hpc_server.text_errors import FrontendError
from tests.server import texts

USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "be brief"}
SPECIALS = (*texts.SPECIAL, *texts.PLAIN)


def tool(name: str = "read", description: str = "reads") -> dict[str, object]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def called(arguments: object, name: str = "read") -> dict[str, object]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def structure(prepared: Prepared) -> list[str]:
    """The structural tokens of a prompt, in order."""
    names = {i: text for text, i in texts.tokenizer().special_ids.items()}
    return [names[i] for i in prepared.prompt.tokens.tolist() if i in names]


def text_of(prepared: Prepared) -> str:
    return texts.tokenizer().decode(prepared.prompt.tokens, skip_special=False)


def positions(prepared: Prepared, kind: HintKind) -> list[int]:
    return [hint.position for hint in prepared.prompt.hints if hint.kind is kind]


def conversation(*said: str) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """A conversation with a text at every place where a client may put one, and its tools."""
    a, b, c, d, e, f, g = said
    messages: list[dict[str, object]] = [
        {"role": "system", "content": a},
        {"role": "user", "content": [{"type": "text", "text": b}, {"type": "text", "text": a}]},
        {
            "role": "assistant",
            "content": c,
            "reasoning_content": d,
            "tool_calls": [called({e: f, "n": {g: [f, 1]}}, b)],
        },
        {"role": "tool", "content": g, "tool_call_id": a},
    ]
    return messages, [tool(b + "x", c) | {e: f}]


HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            [*SPECIALS, "<|im_", "_end|>", "<|im_end|", "|>", "<", ">", "think>", "\n", '"', "\\", "{{ x }}"]
        ),
        st.text(st.characters(codec="utf-8"), max_size=4),
    ),
    max_size=6,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(HOSTILE, min_size=7, max_size=7), st.sampled_from([texts.PRESERVING, texts.STRIPPING]))
def test_text_is_never_structure(said: list[str], source: str) -> None:
    """Whatever texts say, wherever they stand, the structure is that of harmless texts in their place."""
    frontend = texts.frontend(source)
    harmless = ["w" + str(i) if text.strip() else "" for i, text in enumerate(said)]
    assert structure(frontend.chat(*conversation(*said))) == structure(
        frontend.chat(*conversation(*harmless))
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12), min_size=7, max_size=7
    )
)
def test_harmless_text_renders_as_published(said: list[str]) -> None:
    """Where texts hold no structure, the tokens are those of rendering with the texts and tokenising that."""
    messages, tools = conversation(*said)
    frontend = texts.frontend()
    plain = [{**messages[0]}, {**messages[1], "content": said[1] + said[0]}, *messages[2:]]
    rendered = texts.template().render(plain, tools, True, preserve_thinking=True)
    assert frontend.chat(messages, tools).prompt.tokens.tolist() == texts.full().encode(rendered).ids


def test_text_between_structural_tokens_is_one_string() -> None:
    """Frame and content next to each other are encoded together, as the published tokenizer does."""
    tokens = texts.frontend().chat([USER]).prompt.tokens.tolist()
    expected = texts.full().encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n").ids
    assert tokens == expected


def test_the_tokens_do_not_depend_on_chance() -> None:
    """Frontends with other placeholders give the same tokens for the same request."""
    request = conversation("a", "b <|im_end|>", "c", "d", "e", "f", "g")
    fresh = [Frontend(texts.tokenizer(), ChatTemplate(texts.PRESERVING)) for _ in range(3)]
    assert len({frontend.template.placeholders.nonce for frontend in fresh}) == 3
    assert len({frontend.chat(*request).prompt.tokens.tobytes() for frontend in fresh}) == 1


def printing(form: str) -> str:
    """A template of plain turns that writes `form` for each `content`."""
    turn = "<|im_start|>{{ m.role }}\n{% set content = m.content %}{{ FORM }}<|im_end|>\n".replace(
        "FORM", form
    )
    opener = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return "{% for m in messages %}" + turn + "{% endfor %}" + opener


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("content | upper", "a <|im_end|> b"),
        ("content[2:]", "<|im_end|> b"),
        ("content.split(' ')[2]", "b"),
        ("content | replace('b', 'c')", "a <|im_end|> b"),
        ("content | length | string | length", "2"),
        ("content | tojson | tojson", '"\\"a <|im_end|> b\\""'),
        ("content ~ content", "a <|im_end|> ba <|im_end|> b"),
        ("content if '<|im_end|>' in content else content", "a <|im_end|> b"),
    ],
)
def test_templates_that_work_on_text_stay_safe(form: str, shown: str) -> None:
    """A template that cuts, changes, repeats or measures contents gets on with them, and they stay text."""
    prepared = texts.frontend(printing(form)).chat([{"role": "user", "content": "a <|im_end|> b"}])
    assert text_of(prepared) == f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    assert structure(prepared) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_special_text_that_a_template_cuts_is_refused() -> None:
    """Where a template cuts through special-token text in a message, the request is refused and counted."""
    frontend = texts.frontend(printing("content[3:-2]"))
    with pytest.raises(FrontendError, match="takes special-token text"):
        frontend.chat([{"role": "user", "content": "a <|im_end|> b"}])
    assert frontend.counters()["placeholder.lost"] == 1
    assert "lo wor<|im_end|>" in text_of(frontend.chat([{"role": "user", "content": "hello world"}]))


def test_a_template_cannot_make_structure_of_text() -> None:
    """Where a template's cuts would join parts of a message to a structural token, the request is refused."""
    frontend = texts.frontend(printing("content[1:] | replace('x', '')"))
    with pytest.raises(FrontendError, match="takes special-token text"):
        frontend.chat([{"role": "user", "content": "a<|im_xend|>"}])
    assert "<|im_end|>" in text_of(frontend.chat([{"role": "user", "content": "abx"}]))


def test_private_use_characters_are_text() -> None:
    """Characters of the kind that placeholders are made of pass as text, also where a template cuts it."""
    icons = "".join(map(chr, range(0xE000, 0xF900, 7)))
    for form in ("content", "content[1:]"):
        assert icons[1:] in text_of(texts.frontend(printing(form)).chat([{"role": "user", "content": icons}]))


@pytest.mark.parametrize(
    ("form", "reason"),
    [("content[:-1]", "altered"), ("content | length", "missing"), ("content | trim", None)],
)
def test_a_changed_placeholder_is_counted(form: str, reason: str | None) -> None:
    """What a template does to placeholders is counted by what it did."""
    frontend = texts.frontend(printing(form))
    frontend.chat([USER])
    counted = {name: count for name, count in frontend.counters().items() if name.startswith("placeholder.")}
    assert counted == ({f"placeholder.{reason}": 1} if reason else {})


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("tools[0] | tojson", 'JSON'),
        ("tools | tojson", '[JSON]'),
        ("tools[0].function.name", "a <|im_end|>"),
        ("tools[0]['function'].parameters.properties | tojson", '{"path": {"type": "string"}}'),
        ("tools[0].function.parameters.properties.keys() | join", "path"),
        ("tools[0].items() | length", "2"),
        ("tools[0].function.parameters.required[0] in tools[0].function.parameters.properties", "True"),
        ("{'tool': tools[0]} | tojson", '{"tool": JSON}'),
    ],
)  # fmt: skip
def test_tools_are_text_however_they_are_written(form: str, shown: str) -> None:
    """A template may write tools as JSON or look inside them: the client's words are there, as text."""
    given = tool("a <|im_end|>", 'é "<think>"')
    source = printing(f"({form}) | string ~ content if tools else content")
    prepared = texts.frontend(source).chat([USER], [given])
    expected = shown.replace("JSON", json.dumps(given, ensure_ascii=False))
    assert text_of(prepared) == f"<|im_start|>user\n{expected}hello<|im_end|>\n<|im_start|>assistant\n"
    assert structure(prepared) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_trimming_is_the_templates() -> None:
    """White space around contents is cut by a template that trims and kept by one that does not."""
    spaced = {"role": "user", "content": "\n hello \n"}
    assert "user\nhello<|im_end|>" in text_of(texts.frontend().chat([spaced]))
    keeping = texts.frontend("{% for m in messages %}<|im_start|>user\n{{ m.content }}<|im_end|>{% endfor %}")
    assert text_of(keeping.chat([spaced])) == "<|im_start|>user\n\n hello \n<|im_end|>"


def test_empty_contents_are_empty() -> None:
    """A content of white space alone is empty to a template that trims, and writes no separator."""
    prepared = texts.frontend().chat([{"role": "system", "content": " \n"}, USER], [tool()])
    assert "to call one.<|im_end|>" in text_of(prepared)


def test_system_end_is_tapped_exactly() -> None:
    """Two requests that share only tools and system text have a structural hint at that block's exact end."""
    frontend = texts.frontend()
    first = frontend.chat([SYSTEM, {"role": "user", "content": "one"}], [tool()])
    second = frontend.chat([SYSTEM, {"role": "user", "content": "two"}, USER], [tool()])
    end = positions(first, HintKind.STRUCTURAL)[-1]
    assert end in positions(second, HintKind.STRUCTURAL)
    assert first.prompt.tokens[:end].tolist() == second.prompt.tokens[:end].tolist()
    assert (
        texts.tokenizer()
        .decode(first.prompt.tokens[:end], skip_special=False)
        .endswith("be brief<|im_end|>\n")
    )


@given(st.text(st.characters(codec="utf-8"), max_size=10), st.text(st.characters(codec="utf-8"), max_size=10))
@settings(max_examples=40, deadline=None)
def test_end_of_tools_is_shared(one: str, two: str) -> None:
    """Requests that share their tools alone have the same tokens up to their hint at the end of the tools."""
    frontend = texts.frontend()
    made = [frontend.chat([{"role": "system", "content": text}, USER], [tool()]) for text in (one, two)]
    end = min(positions(prepared, HintKind.STRUCTURAL)[0] for prepared in made)
    assert made[0].prompt.tokens[:end].tolist() == made[1].prompt.tokens[:end].tolist()
    assert "to call one" in texts.tokenizer().decode(made[0].prompt.tokens[:end], skip_special=False)


def test_messages_and_opener_are_hinted() -> None:
    """Every turn begins at a message hint, and the generation opener at an opener hint."""
    prepared = texts.frontend().chat([SYSTEM, USER, {"role": "assistant", "content": "hi"}, USER])
    tokens = prepared.prompt.tokens.tolist()
    starts = [i for i, token in enumerate(tokens) if token == texts.special("<|im_start|>")]
    assert positions(prepared, HintKind.MESSAGE) == starts[1:]
    assert positions(prepared, HintKind.OPENER) == [starts[-1]]
    assert positions(prepared, HintKind.STRUCTURAL) == [starts[1]]


def test_boundaries_come_from_the_renderer() -> None:
    """A kept reply that holds structural ids adds no hints: it is one turn."""
    frontend = texts.frontend()
    prepared = frontend.chat([USER])
    reply = [texts.special("<|im_end|>"), texts.special("<|im_start|>"), 65, texts.special("<|im_end|>")]
    out = frontend.output(prepared)
    out.feed(reply)
    out.finish()
    frontend.record_reply(prepared, reply, out.parts())
    message = {"role": "assistant", "content": out.text, "reasoning_content": out.reasoning}
    again = frontend.chat([USER, message, USER])
    assert frontend.counters()["echo_hit"] == 1
    assert len(positions(again, HintKind.MESSAGE)) == 3


@pytest.mark.parametrize(("thinking", "expected"), [(True, True), (False, False), (None, True)])
def test_the_opener_tells_whether_the_reply_starts_in_reasoning(
    thinking: bool | None, expected: bool
) -> None:
    """An open think block in the generation opener means that the reply begins as reasoning."""
    prepared = texts.frontend().chat([USER], kwargs={"enable_thinking": thinking})
    assert prepared.starts_in_reasoning is expected
    assert text_of(prepared).endswith("<think>\n" if expected else "<think>\n\n</think>\n\n")


def test_raw_prompts() -> None:
    """A raw prompt is text or ids; from 512 tokens on it is hinted one token before its end."""
    frontend = texts.frontend()
    short = frontend.completion("hello <|im_end|>")
    assert structure(short) == []
    assert (short.prompt.hints, short.chat, short.echo) == ((), False, None)
    long = frontend.completion(np.full(RAW_HINT_TOKENS, 65, dtype=np.int64))
    assert long.prompt.tokens.dtype == np.int32
    assert positions(long, HintKind.OPENER) == [RAW_HINT_TOKENS - 1]
    given = frontend.completion([65, texts.special("<|im_end|>")])
    assert structure(given) == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([-1], "token id -1, need 0 to"),
        ([10**6], "token id 1000000"),
        ([10**30], "need a flat list|not a list"),
        ([[1]], "flat list"),
        (["a"], "flat list"),
        ([1.5], "flat list"),
        ([True], "flat list"),
        ([1, [2]], "not a list"),
        ("\ud800", "not valid Unicode at character 0"),
    ],
)
def test_bad_raw_prompts_are_named(prompt: object, message: str) -> None:
    """A raw prompt that is empty, no text and no ids, or out of the vocabulary is refused."""
    with pytest.raises(FrontendError, match=message) as raised:
        texts.frontend().completion(prompt)  # type: ignore[arg-type]
    assert raised.value.param == "prompt"


DEEP: dict[str, object] = {"a": 1}
for _ in range(100):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (([], None, {}), "messages"),
        (([3], None, {}), "messages[0]"),
        (([{"content": "x"}], None, {}), "messages[0].role"),
        (([{"role": ["user"], "content": "x"}], None, {}), "messages[0].role"),
        (([{"role": "wizard", "content": "x"}], None, {}), "messages[0].role"),
        (([{"role": "user"}], None, {}), "messages[0].content"),
        (([{"role": "user", "content": 5}], None, {}), "messages[0].content"),
        (([{"role": "user", "content": [{"type": "image_url"}]}], None, {}), "messages[0].content[0].type"),
        (([{"role": "user", "content": ["x"]}], None, {}), "messages[0].content[0].type"),
        (([{"role": "user", "content": [{"type": "text"}]}], None, {}), "messages[0].content[0].text"),
        (([USER, {"role": "user", "content": "a\ud800"}], None, {}), "messages[1].content"),
        (([USER, {"role": "assistant", "content": "a", "reasoning": 1}], None, {}), "messages[1].reasoning"),
        (([USER, {"role": "assistant", "tool_calls": {}}], None, {}), "messages[1].tool_calls"),
        (
            ([USER, {"role": "assistant", "tool_calls": [{}]}], None, {}),
            "messages[1].tool_calls[0].function.name",
        ),
        (
            ([USER, {"role": "assistant", "tool_calls": [called("{")]}], None, {}),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            ([USER, {"role": "assistant", "tool_calls": [called("[1]")]}], None, {}),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            ([USER, {"role": "assistant", "tool_calls": [called('{"a": NaN}')]}], None, {}),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            ([USER, {"role": "assistant", "tool_calls": [called("[" * 100_000)]}], None, {}),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (([USER], [DEEP], {}), "tools[0]"),
        (([USER], ["read"], {}), "tools[0]"),
        (([USER], [tool("a\ud800")], {}), "tools[0]"),
        (([USER, SYSTEM], None, {}), "messages"),
        (([SYSTEM], None, {}), "messages"),
        (([USER], None, {"tokenize": True}), "chat_template_kwargs.tokenize"),
        (([USER], None, {"messages": []}), "chat_template_kwargs.messages"),
        (([USER], None, {"enable_thinking": "no"}), "chat_template_kwargs.enable_thinking"),
    ],
)
def test_bad_requests_name_their_field(
    request_: tuple[list[Any], list[Any] | None, dict[str, Any]], param: str
) -> None:
    """What a client can mend is refused under the path of the field, and no placeholder shows in the text."""
    frontend = texts.frontend()
    messages, tools, kwargs = request_
    with pytest.raises(FrontendError) as raised:
        frontend.chat(messages, tools, kwargs=kwargs)
    assert raised.value.param == param
    assert raised.value.message.isprintable()


def test_arguments_keep_their_order() -> None:
    """Arguments come as JSON text or as an object, and are rendered in the order in which they came."""
    frontend = texts.frontend()
    given = {"zeta": "1", "alpha": {"b": 1, "a": [True, None, "x"]}}
    made = [
        frontend.chat([USER, {"role": "assistant", "content": "", "tool_calls": [called(form)]}, USER])
        for form in (given, json.dumps(given))
    ]
    assert made[0].prompt.tokens.tolist() == made[1].prompt.tokens.tolist()
    assert (
        '<parameter=zeta>\n1\n</parameter>\n<parameter=alpha>\n{"b": 1, "a": [true, null, "x"]}'
        in text_of(made[0])
    )


def test_a_developer_speaks_as_system() -> None:
    """The role `developer` renders as `system`."""
    frontend = texts.frontend()
    made = [frontend.chat([{"role": role, "content": "x"}, USER]) for role in ("developer", "system")]
    assert made[0].prompt.tokens.tolist() == made[1].prompt.tokens.tolist()


def test_only_what_is_new_is_tokenised() -> None:
    """A conversation that grew by one message encodes that message alone."""
    frontend = texts.frontend()
    messages = [SYSTEM, *[{"role": "user", "content": f"question {i}"} for i in range(20)]]
    frontend.chat(messages)
    before = frontend.counters()["text_cache.miss"]
    frontend.chat([*messages, {"role": "user", "content": "one more"}])
    assert frontend.counters()["text_cache.miss"] == before + 1


def test_encoded_texts_are_kept_by_namespace_and_within_bounds() -> None:
    """Another namespace encodes a text again, and the bound holds whatever is sent."""
    frontend = texts.frontend(text_cache_bytes=4000)
    frontend.chat([USER], cache_salt=b"a")
    before = frontend.counters()["text_cache.miss"]
    frontend.chat([USER], cache_salt=b"b")
    assert frontend.counters()["text_cache.miss"] > before
    for i in range(20):
        frontend.chat([{"role": "user", "content": f"{i}" * 100}])
    assert frontend.counters()["text_cache.bytes"] <= 4000
    assert frontend.counters()["text_cache.evicted"] > 0


def test_the_prompt_carries_its_namespace() -> None:
    """Salt and the wish not to be cached reach the index."""
    prepared = texts.frontend().chat([USER], cache_salt=b"s", cacheable=False)
    assert (prepared.prompt.cache_salt, prepared.prompt.cacheable) == (b"s", False)
    assert prepared.echo is None

"""The bundled model's chat template, in a sandbox with the filters that servers give templates."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpc_qwen35.bundled import tiny_folder

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"z": 1, "a": "<é>"}}}


def _template() -> Template:
    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    return environment.from_string((tiny_folder() / "chat_template.jinja").read_text(encoding="utf-8"))


TEMPLATE = _template()


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    return TEMPLATE.render(messages=messages, **options)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, reasoning: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, **fields}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_opener_thinks_by_default() -> None:
    """Without a switch the reply starts inside a think block."""
    text = render([user("Hi")], add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_thinking_switched_off_closes_the_block() -> None:
    """`enable_thinking=False` opens the reply after an empty think block."""
    text = render([user("Hi")], add_generation_prompt=True, enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_tools_come_before_the_system_text_in_one_turn() -> None:
    """New conversations with the same tools share everything up to the system text."""
    text = render([{"role": "system", "content": " Be brief. "}, user("Hi")], tools=[TOOL])
    head, rest = text.split("<|im_end|>\n", 1)
    assert head.startswith("<|im_start|>system\n# Tools\n")
    assert head.endswith("\n\n Be brief. ")
    assert head.startswith(render([user("Hi")], tools=[TOOL]).split("<|im_end|>")[0])
    assert rest == "<|im_start|>user\nHi<|im_end|>\n"


def test_tool_schemas_keep_their_order_and_characters() -> None:
    """Keys stay in the client's order, nothing is escaped for HTML or ASCII."""
    assert f"<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>" in render([user("Hi")], tools=[TOOL])


def test_a_late_system_message_stays_in_place() -> None:
    """It becomes a turn of its own, and what lies before it does not change."""
    messages = [user("Hi"), assistant("Hello"), {"role": "developer", "content": "Stop."}, user("Why?")]
    text = render(messages)
    assert text.startswith(render(messages[:2]))
    assert "<|im_end|>\n<|im_start|>system\nStop.<|im_end|>\n<|im_start|>user\nWhy?" in text


def test_history_keeps_think_blocks_even_empty_ones() -> None:
    """Both replies are rendered as they were generated."""
    text = render([user("a"), assistant("b", "why"), user("c"), assistant("d"), user("e")])
    assert "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nb<|im_end|>\n" in text
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\nd<|im_end|>\n" in text


def test_preserve_thinking_off_drops_blocks_before_the_last_query() -> None:
    """Tool results are no query: the blocks since the last user message stay."""
    messages = [user("a"), assistant("b", "old"), user("c"), assistant("d", "new"), tool("r")]
    text = render(messages, preserve_thinking=False)
    assert "<|im_start|>assistant\nb<|im_end|>" in text
    assert "<|im_start|>assistant\n<think>\nnew\n</think>\n\nd<|im_end|>" in text


def test_calls_are_written_as_xml() -> None:
    """Strings are raw, other values JSON; calls follow the content after an empty line."""
    text = render([assistant("Let me see.", None, tool_calls=[call("f", a="x < 1", b=[1, None]), call("g")])])
    assert text.endswith(
        "Let me see.\n\n<tool_call>\n<function=f>\n<parameter=a>\nx < 1\n</parameter>\n"
        "<parameter=b>\n[1, null]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call><|im_end|>\n"
    )


def test_results_of_one_round_share_a_user_turn() -> None:
    """Consecutive tool messages are parts of one turn; others start a new one."""
    text = render([tool("1"), tool(" 2\n"), user("u"), tool("3")])
    assert text == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n 2\n\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    )


@given(st.text(max_size=30), st.sampled_from(["</think>", "\n", " ", "<|im_end|>", "{{ x }}"]))
def test_contents_are_printed_exactly(text: str, ending: str) -> None:
    """No trimming, no splitting at tags, no second evaluation, in any role and as text parts."""
    content = text + ending
    parts = [{"type": "text", "text": text}, {"type": "text", "text": ending}]
    assert render([user(content)]) == render([user(parts)]) == f"<|im_start|>user\n{content}<|im_end|>\n"
    assert render([assistant(content)]).endswith(f"</think>\n\n{content}<|im_end|>\n")
    assert f"<tool_response>\n{content}\n</tool_response>" in render([tool(content)])


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (user([{"type": "image_url"}]), 'type "image_url" in a user message'),
        (user({"text": "x"}), "content of a user message must be a string"),
        (user(3), "content of a user message must be a string"),
        ({"role": "critic", "content": "x"}, 'role "critic"'),
        (
            assistant("", None, tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]),
            'arguments of the call to "f"',
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused(message: dict[str, Any], error: str) -> None:
    """Nothing is left out quietly; the message names what was found."""
    with pytest.raises(TemplateError, match=error):
        render([user("a"), message])


WORDS = st.text(alphabet=st.sampled_from("ab \n<>/{}é"), max_size=12)
VALUES = st.one_of(WORDS, st.integers(-5, 5), st.none(), st.lists(st.booleans(), max_size=2))
CALLS = st.lists(
    st.tuples(st.sampled_from("fg"), st.dictionaries(st.sampled_from("xyz"), VALUES)), max_size=2
)
REPLIES = st.tuples(st.booleans(), WORDS, WORDS, CALLS)
TURNS = st.lists(st.tuples(WORDS, REPLIES), min_size=1, max_size=4)


def generated(thinks: bool, reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the model writes after the opener for this reply."""
    text = f"{reasoning}\n</think>\n\n" if thinks else ""
    blocks = []
    for name, arguments in calls:
        lines = "".join(
            f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
            for k, v in arguments.items()
        )
        blocks.append(f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>")
    return text + "\n\n".join([content] * bool(content) + ["\n".join(blocks)] * bool(blocks))


@given(turns=TURNS, system=st.none() | WORDS, tools=st.sampled_from([None, [TOOL]]))
def test_a_turn_and_its_reply_are_a_prefix_of_the_next(
    turns: list[tuple[str, Any]], system: str | None, tools: list[dict[str, Any]] | None
) -> None:
    """Whatever was said, thought and called: the next prompt continues the last one and its reply (D23)."""
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    expected = ""
    queue: list[dict[str, Any]] = []
    for text, (thinks, reasoning, content, calls) in turns:
        messages += queue or [user(text)]
        prompt = render(messages, tools=tools, add_generation_prompt=True, enable_thinking=thinks)
        assert prompt.startswith(expected)
        expected = prompt + generated(thinks, reasoning, content, calls) + "<|im_end|>\n"
        made = [call(name, **arguments) for name, arguments in calls]
        messages.append(assistant(content, reasoning if thinks else None, tool_calls=made or None))
        queue = [tool(f"{text}{i}") for i in range(len(calls))]
    assert render(messages, tools=tools) == expected

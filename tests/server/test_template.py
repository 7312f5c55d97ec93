"""The chat template: sandboxed, bounded, and rendered as the published templates mean it."""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest

from hpc_server.template import ChatTemplate
from hpc_server.template_budget import Bounds
from hpc_server.template_probe import probe_template
from hpc_server.text_errors import TemplateError
from tests.server import texts

USER = {"role": "user", "content": "hello"}
BRIEF = Bounds(seconds=0.2)


def rendered(source: str, **more: object) -> str:
    return ChatTemplate(source).render([USER], None, True, **more)


CALL = {
    "type": "function",
    "function": {"name": "read", "arguments": {"path": "a b", "lines": [1, 2.5, True, None]}},
}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": " be brief\n"}, USER],
    [USER, {"role": "assistant", "content": "hi", "reasoning_content": "\nwhy\n"}, USER],
    [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "é"},
    ],
    [
        USER,
        {"role": "assistant", "content": "x", "tool_calls": [CALL]},
        *[{"role": "tool", "content": "1"}] * 2,
        USER,
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "read", "description": 'é "quoted" <b>', "parameters": {"z": 1, "a": 2}},
    }
]


@pytest.mark.parametrize("source", [texts.PRESERVING, texts.STRIPPING])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_as_plain_jinja_does(
    source: str, messages: list[dict[str, object]], tools: list[object] | None
) -> None:
    """The bounds change nothing in what a well-behaved template writes: plain Jinja is the model."""
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    plain.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    expected = plain.from_string(source).render(messages=messages, tools=tools, add_generation_prompt=True)
    assert texts.template(source).render(messages, tools, True) == expected


ATTACKS = {
    "mro": "{{ ''.__class__.__mro__ }}",
    "item": "{{ ''['__class__'] }}",
    "computed item": "{{ ''['__cla' ~ 'ss__'].mro() }}",
    "lipsum": "{{ lipsum.__globals__ }}",
    "cycler": "{{ cycler.__init__ }}",
    "attribute filter": "{{ ''|attr('__class__') }}",
    "mapped attribute": "{{ ['']|map(attribute='__class__')|list|first }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "self": "{{ self._TemplateReference__context }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a message": "{{ messages[0].update({'role': 'x'}) }}",
    "format": "{{ '{0.__class__}'.format('') }}",
    "object": "{{ range }}",
    "method": "{{ messages.clear }}",
    "list as text": "{{ messages }}",
    "list as text, joined": "{{ ['a', messages]|join }}",
    "list as text, filtered": "{{ messages|trim }}",
    "list as text, added": "{{ 'a' ~ messages }}",
    "unknown filter": "{{ 1|pprint }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
}


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_internals_are_out_of_reach(source: str) -> None:
    """A template that reaches for internals, files or its input is refused, at load or later (T1)."""
    with pytest.raises(TemplateError):
        rendered(source)
    assert USER == {"role": "user", "content": "hello"}


def repeated(times: int, body: str, start: str) -> str:
    """A template that runs `ns.x = body` many times."""
    loop = f"{{% for i in range({times}) %}}{{% set ns.x = {body} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={start}) %}}" + loop


NESTED = repeated(60, "[ns.x, ns.x]", "[1]")
BOMBS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "".join(
        f"{{% macro m{i}() %}}{f'{{{{ m{i + 1}() }}}}' * 2}{{% endmacro %}}" for i in range(200)
    )
    + "{% macro m200() %}x{% endmacro %}{{ m0() }}",
    "branching macros": "{% macro m(n) %}{% if n %}"
    + "{{ m(n - 1) }}" * 2
    + "{% endif %}{% endmacro %}{{ m(60) }}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "growing text": repeated(99_999, "ns.x ~ 'xxxxxxxx'", "''"),
    "doubling text": repeated(99, "ns.x + ns.x", "'x'"),
    "repeated text": "{{ 'x' * 10**10 }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "big number": repeated(99, "ns.x * ns.x", "7"),
    "format": "{{ '%1000000000d' % 1 }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "padding": "{{ 'x'.center(10**9) }}",
    "nested list, printed": NESTED + "{{ ns.x|string }}",
    "nested list, compared": NESTED + "{{ ns.x == [ns.x, 1] }}",
    "nested list, as JSON": NESTED + "{{ ns.x|tojson }}",
    "join": "{{ ('x' * 100000)|join('y' * 10000) }}",
    "join method": "{{ ('y' * 10000).join('x' * 90000) }}",
    "replace": "{{ ('x' * 100000)|replace('', 'y' * 10000) }}",
    "replace method": "{{ ('x' * 100000).replace('x', 'y' * 10000) }}",
    "indent": "{{ ('\\n' * 100000)|indent(4000) }}",
    "constant text": "{% for i in range(99999) %}" + "y" * 50_000 + "{% endfor %}",
    "block text": "{% set x %}{% for i in range(99999) %}" + "y" * 50_000 + "{% endfor %}{% endset %}",
    "filters": "{% for i in range(99999) %}{{ range(99999)|map('string')|join|length }}{% endfor %}",
    "date": "{{ strftime_now('%1000000000Y') }}",
    "source": "{# " + "x" * (1 << 17) + " #}",
    "syntax": "{{1}}" * 10_001,
    "depth": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_hostile_template_is_stopped(source: str) -> None:
    """Whatever a template repeats or grows, it is stopped soon after its time (T2)."""
    began = time.monotonic()
    with pytest.raises(TemplateError):
        ChatTemplate(source, date=datetime.date(2026, 1, 1), bounds=BRIEF).render([USER], None, True)
    assert time.monotonic() - began < BRIEF.seconds + 1


def test_the_default_time_is_within_two_seconds() -> None:
    """Without bounds of its own a template is stopped within 2 seconds (T2)."""
    began = time.monotonic()
    with pytest.raises(TemplateError, match=r"longer than 1\.5 s"):
        rendered(BOMBS["loops"])
    assert time.monotonic() - began < 2


def longest_gap(attack: Callable[[], None]) -> float:
    """Longest time that this thread did not run while another one attacks."""
    thread = threading.Thread(target=attack)
    gap, last = 0.0, time.monotonic()
    thread.start()
    while thread.is_alive():
        time.sleep(0.005)
        now = time.monotonic()
        gap, last = max(gap, now - last), now
    return gap


@pytest.mark.parametrize(
    "name", ["loops", "nested list, as JSON", "filters", "growing text", "branching macros"]
)
def test_a_hostile_template_does_not_stall_others(name: str) -> None:
    """While one thread renders a hostile template, others run at least every 200 ms (T2)."""

    def attack() -> None:
        with pytest.raises(TemplateError):
            ChatTemplate(BOMBS[name], bounds=BRIEF).render([USER], None, True)

    # What holds the interpreter holds it every time; a busy machine does not.
    assert min(longest_gap(attack) for _ in range(2)) < 0.2


def test_bounds_grow_with_the_conversation() -> None:
    """A long conversation that is not masked is no attack: its text may be written out."""
    long = {"role": "user", "content": "x" * 3_000_000}
    assert len(texts.template().render([long], None, True)) > 3_000_000


def test_a_long_conversation_is_rendered() -> None:
    """Thousands of messages are within the bounds: what a template does with each does not grow with all."""
    turn = [USER, {"role": "assistant", "content": "hi", "reasoning_content": "why"}]
    assert texts.template().render([*turn * 1500, USER], None, True).count("<|im_start|>") == 3002


def test_json_keeps_order_and_text() -> None:
    """`tojson` neither sorts keys nor escapes letters or markup, and takes the usual arguments."""
    value = {"b": "é<b>", "a": [1]}
    template = ChatTemplate("{{ tools|tojson }} {{ tools[0]|tojson(indent=1, ensure_ascii=true) }}")
    expected = f"{json.dumps([value], ensure_ascii=False)} {json.dumps(value, indent=1)}"
    assert template.render([USER], [value], True) == expected


def test_the_date_is_pinned_or_not_there() -> None:
    """A template that asks for the date gets the one given at start; without one there is none to ask for."""
    source = "{{ strftime_now('%d %B %Y') }}"
    pinned = ChatTemplate(source, date=datetime.date(2026, 1, 2))
    assert pinned.render([USER], None, True) == "02 January 2026"
    with pytest.raises(TemplateError, match="strftime_now"):
        rendered(source)
    assert rendered("{{ strftime_now is defined }}") == "False"


def test_a_refusal_carries_the_templates_words() -> None:
    """What a template says with raise_exception is told apart from its failures."""
    with pytest.raises(TemplateError, match="no thanks") as refused:
        rendered("{{ raise_exception('no thanks') }}")
    with pytest.raises(TemplateError) as failed:
        rendered("{{ missing.field.other }}")
    assert refused.value.refusal
    assert not failed.value.refusal


ONE = json.dumps({"chat_template": "one{{ eos_token }}", "eos_token": "</s>"})
NAMED = json.dumps(
    {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "two"}]}
)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": ONE}, "one</s>"),
        ({"tokenizer_config.json": NAMED}, "two"),
        ({"chat_template.jinja": "three", "tokenizer_config.json": ONE}, "three"),
    ],
)
def test_where_a_template_is_found(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    """The file of its own counts first, then the configuration's text or its template named default."""
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert ChatTemplate.load(tmp_path).render([USER], None, True) == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither"),
        ({"tokenizer_config.json": "{"}, "not JSON"),
        ({"tokenizer_config.json": "[]"}, "holds list"),
        ({"chat_template.jinja": "{% if %}"}, "line 1"),
        ({"chat_template.jinja": b"\xff"}, "cannot be read"),
    ],
)
def test_damaged_template_files_are_named(
    tmp_path: Path, files: dict[str, str | bytes], message: str
) -> None:
    """A missing or damaged template is refused with what is wrong."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TemplateError, match=message):
        ChatTemplate.load(tmp_path)


def test_probe_of_a_stripping_template() -> None:
    """Of a template as 3.5's: thinking can be switched and is dropped from history, contents are trimmed."""
    probe = probe_template(texts.template(texts.STRIPPING), texts.tokenizer().special_ids)
    assert (probe.opens, probe.closes) == (texts.special("<|im_start|>"), texts.special("<|im_end|>"))
    assert probe.assistant == "assistant"
    assert probe.thinking_switch
    assert probe.tools_first
    assert not any((probe.keeps_thinking, probe.keeps_empty_think, probe.late_system))
    assert probe.trims == ("system", "user", "assistant", "reasoning", "tool")


def test_probe_of_a_preserving_template() -> None:
    """Of a template as 3.6's: preserve_thinking keeps think blocks, also empty ones."""
    probe = probe_template(texts.template(texts.PRESERVING), texts.tokenizer().special_ids)
    assert probe.keeps_thinking
    assert probe.keeps_empty_think
    assert not probe.keeps_thinking_by_default


def test_probe_of_a_template_without_turns() -> None:
    """A template that frames nothing with structural tokens has no turns to find."""
    plain = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    probe = probe_template(plain, texts.tokenizer().special_ids)
    assert (probe.opens, probe.closes, probe.trims) == (None, None, ())
    assert probe.late_system


def test_a_template_that_renders_nothing_is_refused() -> None:
    """A template that cannot render one user message stops the start."""
    with pytest.raises(TemplateError, match="never"):
        probe_template(ChatTemplate("{{ raise_exception('never') }}"), {})


@pytest.mark.parametrize("source", ["", "hello", "{{ messages[0].role }}", "{{ messages | length }}"])
def test_a_template_that_leaves_the_users_words_out_is_refused(source: str) -> None:
    """It would serve answers to nothing; whoever starts the server is told."""
    with pytest.raises(TemplateError, match="what the user says"):
        probe_template(ChatTemplate(source), {})

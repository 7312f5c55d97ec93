"""A reply's ids to reasoning and content."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_server.output import OutputStream
from hpc_server.text_errors import FrontendError
from tests.server import texts

THINK, END_THINK = texts.special("<think>"), texts.special("</think>")
IM_END = texts.special("<|im_end|>")


def ids(*parts: str | int) -> list[int]:
    """Ids of texts, and structural ids as they are."""
    out: list[int] = []
    for part in parts:
        out += [part] if isinstance(part, int) else texts.tokenizer().encode_text(part).tolist()
    return out


def stream(starts_in_reasoning: bool = False, stops: tuple[str, ...] = ()) -> OutputStream:
    return OutputStream(texts.tokenizer(), starts_in_reasoning=starts_in_reasoning, stops=stops)


def played(out: OutputStream, pieces: Iterable[list[int]]) -> tuple[str, str, list[int]]:
    """(reasoning, content, positions of attributed ids) of all deltas."""
    deltas = [delta for piece in pieces for delta in out.feed(piece)] + out.finish()
    text = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content")}
    assert (out.reasoning, out.text) == (text["reasoning"], text["content"])
    return text["reasoning"], text["content"], [at for delta in deltas for at in delta.tokens]


REPLIES = st.lists(
    st.one_of(
        st.sampled_from([THINK, END_THINK, IM_END]),
        st.integers(0, texts.tokenizer().vocab_size - 1),
        st.sampled_from(ids("\n\nab\n é")),
    ),
    max_size=30,
)
STOPS = st.lists(st.sampled_from(["a", "ab", "\n", "é", "b\n", "\ufffd"]), max_size=3).map(tuple)


@given(REPLIES, st.booleans(), STOPS)
def test_one_at_a_time_equals_all_at_once(reply: list[int], inside: bool, stops: tuple[str, ...]) -> None:
    """Text, stop, counts and the ids to be kept do not depend on how the ids arrive."""
    once, single = stream(inside, stops), stream(inside, stops)
    assert played(once, [reply])[:2] == played(single, [[token] for token in reply])[:2]
    assert (once.stop_string, once.tokens, once.reasoning_tokens) == (
        single.stop_string,
        single.tokens,
        single.reasoning_tokens,
    )
    assert once.parts() == single.parts()


@given(REPLIES, st.booleans(), STOPS)
def test_no_id_is_attributed_twice(reply: list[int], inside: bool, stops: tuple[str, ...]) -> None:
    """Ids belong to deltas in order and at most once, and structural ids to none."""
    _, _, attributed = played(stream(inside, stops), [[token] for token in reply])
    assert attributed == sorted(set(attributed))
    assert all(reply[at] != IM_END for at in attributed)


@given(REPLIES, STOPS)
def test_kept_ids_give_the_text_that_was_shown(reply: list[int], stops: tuple[str, ...]) -> None:
    """After a stop string the kept ids and the remainder read as the client's text does."""
    out = stream(stops=stops)
    played(out, [reply])
    parts = out.parts()
    if parts.kept is None:
        assert not out.stopped
        return
    again = stream()
    again.feed(reply[: parts.kept])
    again.finish()
    assert again.text + parts.remainder == out.text
    assert again.reasoning == out.reasoning


@pytest.mark.parametrize(
    ("inside", "reply", "expected"),
    [
        (True, ids("why\n", END_THINK, "\n\nyes", IM_END), ("why", "yes")),
        (True, ids("\n\na\n\nb", END_THINK, "yes"), ("a\n\nb", "yes")),
        (True, ids("cut short\n"), ("cut short", "")),
        (True, ids(END_THINK, "\n\nyes"), ("", "yes")),
        (False, ids(THINK, "\nwhy\n", END_THINK, "\n\nyes"), ("why", "yes")),
        (False, ids("\n\nyes\n"), ("", "\n\nyes\n")),
        (False, ids("a", END_THINK, "b"), ("", "a</think>b")),
        (False, ids("a</think>b<think>c"), ("", "a</think>b<think>c")),
        (True, ids("a", THINK, "b"), ("a<think>b", "")),
    ],
)
def test_think_blocks(inside: bool, reply: list[int], expected: tuple[str, str]) -> None:
    """Think tokens switch, text that reads like them does not, and the newlines around them are left out."""
    assert played(stream(inside), [[token] for token in reply])[:2] == expected


def test_special_tokens_are_not_shown() -> None:
    """Structural ids that end or lie inside a reply show no text; tool-call tokens do."""
    reply = ids("a", IM_END, "b", texts.special("<tool_call>"), IM_END)
    assert played(stream(), [reply])[1] == "ab<tool_call>"
    shown = OutputStream(texts.tokenizer(), skip_special=False)
    assert played(shown, [reply])[1] == "a<|im_end|>b<tool_call><|im_end|>"


def test_raw_completions_have_no_think_blocks() -> None:
    """Without a chat, think tokens are text."""
    out = OutputStream(texts.tokenizer(), parse_thinking=False)
    assert played(out, [ids("a", THINK, "b")])[:2] == ("", "a<think>b")


def test_stop_strings_leave_reasoning_alone() -> None:
    """A stop string in the reasoning does not end the reply; in the content it does."""
    out = stream(True, ("END",))
    assert played(out, [ids("an END of it", END_THINK, "one END two", IM_END)])[:2] == (
        "an END of it",
        "one ",
    )
    assert out.stopped
    assert out.stop_string == "END"
    assert out.tokens < len(ids("an END of it", END_THINK, "one END two", IM_END))


def test_reasoning_tokens_are_counted() -> None:
    """Reasoning counts its ids and the token that closes it."""
    reasoning = ids("because of this")
    out = stream(True)
    out.feed([*reasoning, END_THINK, *ids("yes"), IM_END])
    assert out.reasoning_tokens == len(reasoning) + 1
    assert not out.in_reasoning


def test_ids_of_a_held_back_character_come_with_it() -> None:
    """The ids of a character that takes several are attributed to the delta that shows it."""
    reply = ids("東")
    assert len(reply) > 1
    out = stream()
    assert [out.feed([token]) for token in reply[:-1]] == [[]] * (len(reply) - 1)
    [delta] = out.feed(reply[-1:])
    assert delta.tokens == tuple(range(len(reply)))


def test_stops_are_checked() -> None:
    """A bad stop string is the client's error."""
    with pytest.raises(FrontendError, match=r"stop\[0\]"):
        stream(stops=("",))

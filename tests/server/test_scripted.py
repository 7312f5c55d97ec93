"""The scripted program: it notices wrong bytes, and its script files are read strictly."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_index.ids import LaneId
from hpc_index.records import CopyKind, Plan, Plans, PromptView, Quote
from hpc_index.requests import Request
from hpc_server.scripted import ScriptedProgram
from hpc_server.scripted_memory import PrefixDigests, WrongReuseError
from hpc_server.scripted_replies import FileReplies, HashReplies, ScriptFileError
from hpc_server.scripted_transfers import Transfers
from tests.server import texts
from tests.server.driving import VOCAB, Driver, request
from tests.server.served import geometry, small

REPLIES = HashReplies(low=100, high=400)


def view(tokens: list[int], salt: bytes = b"", extras: list[int] | None = None) -> PromptView:
    keys = None if extras is None else np.array(extras, dtype=np.uint64)
    return PromptView(np.array(tokens, dtype=np.int32), extras=keys, cache_salt=salt)


def plain(tokens: list[int], salt: bytes = b"", extras: list[int] | None = None) -> list[int]:
    return [int(value) for value in PrefixDigests(view(tokens, salt, extras), 4).values]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.integers(0, 40))
def test_digests_do_not_depend_on_how_a_sequence_grew(tokens: list[int], cut: int) -> None:
    """Extending gives the digests of the whole."""
    grown = PrefixDigests(view(tokens[:cut]), 4)
    for token in tokens[cut:]:
        grown.extend(np.array([token], dtype=np.int32))
    assert grown.values.tolist() == plain(tokens)
    assert grown.tokens.tolist() == tokens


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(st.integers(0, 5), min_size=1, max_size=12)
)
def test_digests_agree_exactly_on_the_common_prefix(a: list[int], b: list[int]) -> None:
    """From the first token that differs on, all digests differ."""
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    for i, (x, y) in enumerate(zip(plain(a), plain(b), strict=False)):
        assert (x == y) == (i < common)


def test_salt_and_media_keys_are_part_of_a_digest() -> None:
    """The same tokens in another namespace or with another image are another prefix."""
    tokens = [1, 2, 3, 4, 5, 6]
    assert plain(tokens)[0] != plain(tokens, b"a")[0] != plain(tokens, b"b")[0]
    first, second = plain(tokens, extras=[0, 1]), plain(tokens, extras=[0, 2])
    assert first[:4] == second[:4]
    assert first[4] != second[4]


def _swap(kind: CopyKind) -> object:
    """A fault of the copying side: the first copy of this kind takes the wrong source."""
    enqueue = Transfers.enqueue
    done: list[bool] = []

    def faulty(self: Transfers, plans: Plans, now: float, lane: LaneId | None = None) -> None:
        changed: list[Plan] = []
        for plan in plans:
            copies = list(plan.copies)
            for i, copy in enumerate(copies):
                if copy.kind is kind and not done:
                    done.append(True)
                    copies[i] = attrs.evolve(copy, src=(copy.src + 1) % 8)
            changed.append(attrs.evolve(plan, copies=tuple(copies)))
        enqueue(self, tuple(changed), now, lane)

    return faulty


@pytest.mark.parametrize("kind", [CopyKind.SLOT_TO_SLOT, CopyKind.PAGE_TO_PAGE])
def test_a_copy_from_the_wrong_place_is_noticed(kind: CopyKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong source of one device copy makes the next pass raise."""
    program = ScriptedProgram(REPLIES, vocab_size=VOCAB, options=small())
    run = Driver.over(program)
    tokens = list(range(10, 80))
    stream = run.submit(request(tokens, 20))
    run.run()
    monkeypatch.setattr(Transfers, "enqueue", _swap(kind))
    again = program.quote(request([*tokens, *stream.ids, 5], 4), 9.0)
    assert again.reuse == 89
    lane = program.admit(again, request([*tokens, *stream.ids, 5], 4), 9.0, None)
    assert isinstance(lane, int)
    with pytest.raises(WrongReuseError, match=f"lane {lane}"):
        program.prefill(lane, 64, 9.0)


@pytest.mark.parametrize("kind", [CopyKind.SLABS_TO_SLOT, CopyKind.SLAB_TO_PAGE])
def test_a_restore_from_the_wrong_slab_is_noticed(kind: CopyKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong slab of a restore makes the step that waits for it raise."""
    options = small(geometry(pages=16, lanes=1, slots=2, slabs=256))
    program = ScriptedProgram(REPLIES, vocab_size=VOCAB, options=options)
    run = Driver.over(program)
    for seed in range(4):
        run.submit(request([20 + seed] * 120, 4))
        run.run()
    wanted = request([20] * 130, 4)
    quote = program.quote(wanted, 99.0)
    assert quote.restore_bytes > 0
    monkeypatch.setattr(Transfers, "enqueue", _swap(kind))
    with pytest.raises(WrongReuseError):
        _first_pass(program, quote, wanted)


def _first_pass(program: ScriptedProgram, quote: Quote, wanted: Request) -> None:
    lane = program.admit(quote, wanted, 99.0, None)
    assert isinstance(lane, int)
    program.prefill(lane, 64, 99.0)


def script(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_lines_answer_by_key_or_in_order(tmp_path: Path) -> None:
    """A line with `when` answers prompts that hold it; the others take turns."""
    tokens = texts.tokenizer()
    path = script(tmp_path, {"text": "one"}, {"text": "two"}, {"when": "fox", "tokens": [300, 301]}, "")
    replies = FileReplies(path, tokens)

    def say(text: str) -> str:
        return tokens.decode(replies.reply(tokens.encode_text(text)).tolist(), skip_special=False)

    assert [say("hello"), say("hello"), say("hello")] == ["one", "two", "one"]
    assert replies.reply(tokens.encode_text("a fox")).tolist() == [300, 301]
    assert all(replies.filler(tokens.encode_text("x"), i) < tokens.vocab_size for i in range(50))


def test_special_tokens_in_a_script_are_tokens(tmp_path: Path) -> None:
    """A script can end the reasoning; a text without special tokens is text."""
    tokens = texts.tokenizer()
    replies = FileReplies(script(tmp_path, {"text": "so\n</think>\n\nhello"}, {"text": "a < b"}), tokens)
    first, second = (replies.reply(tokens.encode_text("x")).tolist() for _ in range(2))
    assert first.count(texts.special("</think>")) == 1
    assert tokens.decode(first, skip_special=False) == "so\n</think>\n\nhello"
    assert second == tokens.encode_text("a < b").tolist()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "script.jsonl:2: not JSON"),
        ({}, "either text or tokens"),
        ({"text": "a", "tokens": [1]}, "either text or tokens"),
        ({"text": 5}, "text must be a string"),
        ({"tokens": [10**6]}, "1000000 is not a token id"),
        ({"tokens": 1}, "tokens must be a list"),
        ({"text": "a", "when": 1}, "when must be a string"),
        ({"text": "a", "then": 1}, "unknown key 'then'"),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, line: object, words: str) -> None:
    """A script is refused as a whole, at its first wrong line."""
    with pytest.raises(ScriptFileError, match=words):
        FileReplies(script(tmp_path, {"text": "fine"}, line), texts.tokenizer())


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    """So is a file without a reply, or a prompt that no line answers."""
    with pytest.raises(ScriptFileError, match="cannot be read"):
        ScriptedProgram.from_file(tmp_path / "none", texts.tokenizer())
    with pytest.raises(ScriptFileError, match="no reply"):
        FileReplies(script(tmp_path, ""), texts.tokenizer())
    only = FileReplies(script(tmp_path, {"when": "fox", "text": "x"}), texts.tokenizer())
    with pytest.raises(LookupError, match="no line"):
        only.reply(texts.tokenizer().encode_text("hello"))

"""Ids to text as they come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpc_server.detokenize import Detokenizer
from tests.server import texts

IDS = st.lists(st.integers(0, texts.tokenizer().vocab_size - 1), max_size=40)


@given(IDS)
def test_pieces_add_up(ids: list[int]) -> None:
    """One id at a time gives the text of all ids at once, invalid bytes included."""
    detokenizer = Detokenizer(texts.tokenizer())
    text = "".join(detokenizer.feed(token) for token in ids) + detokenizer.flush()
    assert text == texts.tokenizer().decode(ids, skip_special=False)


@given(st.text(max_size=20))
def test_a_character_comes_whole(text: str) -> None:
    """Of valid text no piece holds a replacement character: unfinished characters are held back."""
    detokenizer = Detokenizer(texts.tokenizer())
    pieces = [detokenizer.feed(token) for token in texts.tokenizer().encode_text(text).tolist()]
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    assert not detokenizer.pending


def test_an_unfinished_character_is_pending() -> None:
    """While a character lacks bytes nothing is given out; at the end it is one U+FFFD."""
    detokenizer = Detokenizer(texts.tokenizer())
    [first] = [i for i in range(300) if texts.tokenizer().token_bytes(i) == b"\xe2"]  # begins three bytes
    assert detokenizer.feed(first) == ""
    assert detokenizer.pending
    assert detokenizer.flush() == "\ufffd"

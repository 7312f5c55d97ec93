"""The tokenizer: text never yields structure, and files are read with care."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_server.text_errors import EncodingError, TokenizerError
from hpc_server.tokenizer import Tokenizer
from tests.server import texts

SNIPPETS = st.lists(
    st.one_of(
        st.sampled_from([*texts.SPECIAL, *texts.PLAIN, "<|im_", "end|>", "<th", "ink>", "\n", " "]),
        st.text(max_size=8),
    ),
    max_size=8,
).map("".join)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(texts.document(), encoding="utf-8")
    return tmp_path


@given(SNIPPETS)
def test_text_is_never_structure(text: str) -> None:
    """Whatever a text says, none of its ids is that of an added token, and it decodes to itself in NFC."""
    tokenizer = texts.tokenizer()
    ids = tokenizer.encode_text(text)
    assert not set(ids.tolist()) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(ids, skip_special=False) == texts.full().normalizer.normalize_str(text)


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<"), max_size=40))
def test_text_without_structure_is_encoded_as_published(text: str) -> None:
    """Text that holds no added token has the ids that the published tokenizer gives it."""
    assert texts.tokenizer().encode_text(text).tolist() == texts.full().encode(text).ids


@given(st.lists(st.integers(0, texts.tokenizer().vocab_size - 1), max_size=30), st.booleans())
def test_decoding_is_the_librarys(ids: list[int], skip: bool) -> None:
    """Any ids, also ones whose bytes are no UTF-8, decode as the library decodes them."""
    expected = texts.full().decode(ids, skip_special_tokens=skip)
    assert texts.tokenizer().decode(ids, skip_special=skip) == expected


def test_bytes_of_ids() -> None:
    """An id stands for its bytes; an added token for its text; an id without a token for nothing."""
    tokenizer = texts.tokenizer()
    ids = tokenizer.encode_text("é ok")
    assert b"".join(map(tokenizer.token_bytes, ids.tolist())) == "é ok".encode()
    assert tokenizer.token_bytes(texts.special("<think>")) == b"<think>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_ids_are_int32_arrays() -> None:
    """Ids travel as int32 arrays, also those of an empty text and of a raw prompt."""
    tokenizer = texts.tokenizer()
    for ids in (tokenizer.encode_text(""), tokenizer.encode_text("a"), tokenizer.encode_raw("<|im_end|>")):
        assert ids.dtype == np.int32
        assert ids.ndim == 1
    assert tokenizer.encode_raw("<|im_end|>").tolist() == tokenizer.encode_text("<|im_end|>").tolist()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "generation_config.json": {"eos_token_id": [421, 422]},
                "tokenizer_config.json": {"eos_token": "x"},
            },
            {421, 422},
        ),
        ({"generation_config.json": {"eos_token_id": 422}}, {422}),
        ({"generation_config.json": {}, "tokenizer_config.json": {"eos_token": "<|im_end|>"}}, {422}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|endoftext|>"}}}, {420}),
        ({"tokenizer_config.json": {}, "config.json": {"eos_token_id": 420}}, {420}),
        ({"config.json": {"text_config": {"eos_token_id": 422}}}, {422}),
        ({}, set()),
    ],
)
def test_end_of_sequence_ids_in_order_of_files(
    folder: Path, files: dict[str, object], expected: set[int]
) -> None:
    """generation_config.json counts before tokenizer_config.json, and that before config.json."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    assert Tokenizer.load(folder).eos_ids == expected


def changed(**fields: object) -> str:
    return json.dumps(json.loads(texts.document()) | fields)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "no such file"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "holds list"),
        ("{}", "not ByteLevel"),
        (changed(model={"type": "Unheard"}), "not a tokenizer"),
        (changed(added_tokens=[{"content": "<x>", "id": -1}]), "id of 31 bits"),
        (changed(added_tokens=[{"content": "<x>", "id": 500, "lstrip": True}]), "lstrip"),
        (changed(added_tokens=[{"content": "a", "id": 64}]), "even without added tokens"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: str | None, what: str) -> None:
    """A tokenizer.json that cannot be used is named with what is wrong."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=what) as raised:
        Tokenizer.load(tmp_path)
    assert raised.value.file == tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [99999999]}'),
        ("tokenizer_config.json", '{"eos_token": "<|nothing|>"}'),
        ("config.json", "nonsense"),
    ],
)
def test_damaged_side_files_are_refused(folder: Path, name: str, content: str) -> None:
    """A file that names the end-of-sequence ids wrongly stops the start."""
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError):
        Tokenizer.load(folder)


@pytest.mark.parametrize("unit", ["a", " ", "\t ", "\n", "hello world ", "😀", "東京"])
def test_far_too_long_a_text_is_found_without_encoding_it_whole(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What exceeds twice a bound says so after a few pieces; what is within the bound never does."""
    tokenizer = texts.tokenizer()
    encoded: list[int] = []
    whole = Tokenizer.encode_text

    def counted(self: Tokenizer, text: str) -> object:
        encoded.append(len(text))
        return whole(self, text)

    fits = unit * 2000
    bound = len(tokenizer.encode_text(fits))
    monkeypatch.setattr(Tokenizer, "encode_text", counted)
    assert not tokenizer.exceeds(fits, bound)
    assert tokenizer.exceeds(unit * (4_000_000 // len(unit)), 1000)
    assert sum(encoded) < 2_000_000


class _Panicking:
    """Stands for the library where its patterns give up."""

    def encode(self, _text: str, *, add_special_tokens: bool) -> object:
        raise PanicException("retry-limit-in-match over")


class PanicException(BaseException):
    """Named as the library's, which cannot be imported."""


def test_a_panic_of_the_library_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no Exception, and would pass by every handler."""
    tokenizer = Tokenizer(json.loads(texts.document()), file=Path("tokenizer.json"))
    monkeypatch.setattr(tokenizer, "_text", _Panicking())
    with pytest.raises(EncodingError, match="5 characters"):
        tokenizer.encode_text("hello")

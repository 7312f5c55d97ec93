"""The bundled tiny model: its files, its tokenizer, and that it is reproducible."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import softplus
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from hpc_qwen35.bundled import tiny_folder
from hpc_qwen35.config import LayerKind, parse_config, read_config
from hpc_qwen35.names import expected_tensors

TOOLS = Path(__file__).parents[2] / "packages" / "hpc-qwen35" / "tools"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tiny_folder() / "tokenizer.json"))


@pytest.fixture
def make_tiny(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("make_tiny")


def test_the_weights_are_complete_and_small() -> None:
    """Every tensor that the config implies, in BF16, at most 5 M parameters and 12 MB."""
    tensors = load_file(tiny_folder() / "model.safetensors")
    expected = {f"model.{k}": v for k, v in expected_tensors(read_config(tiny_folder())).items()}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert sum(t.numel() for t in tensors.values()) <= 5_000_000
    assert (tiny_folder() / "model.safetensors").stat().st_size <= 12_000_000


def test_the_model_has_both_kinds_of_layer() -> None:
    """Six GDN layers and two of full attention, every fourth, in 32k positions."""
    config = read_config(tiny_folder())
    kinds = [kind is LayerKind.ATTENTION for kind in config.layers]
    assert kinds == [False, False, False, True] * 2
    assert config.max_position_embeddings == 32768
    assert config.tie_word_embeddings


def test_heads_forget_at_different_and_useful_rates() -> None:
    """Without input a GDN head keeps its state for between half a token and a few thousand."""
    tensors = load_file(tiny_folder() / "model.safetensors")
    rates = [
        tensors[name].float().exp() * softplus(tensors[name.replace("A_log", "dt_bias")].float())
        for name in tensors
        if name.endswith("A_log")
    ]
    nats = torch.cat(rates)
    assert nats.shape == (6 * 4,)
    assert 1 / 4096 < nats.min() < 1 / 64
    assert 1 / 4 < nats.max() < 2


def test_transformers_loads_it_and_its_output_is_sane() -> None:
    """No tensor missing or left over; finite logits, neither flat nor one-hot; greedy text does not stall."""
    loaded: Any = Qwen3_5ForCausalLM.from_pretrained(
        tiny_folder(), dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    prompt = torch.arange(300, 340)[None]
    with torch.no_grad():
        logits = model(prompt).logits[0]
        logs = logits.double().log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1).mean().item()
        reply = model.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert logits.isfinite().all()
    assert 2.0 < entropy < math.log(4096) - 1.0
    assert len(set(reply[0, 40:].tolist())) > 32


def test_transformers_reads_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    """AutoTokenizer gives the ids of tokenizer.json, special tokens included."""
    text = (
        "<|im_start|>user\nHow many of the 1234 blocks don't fit?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    auto = AutoTokenizer.from_pretrained(tiny_folder())
    assert auto(text)["input_ids"] == tokenizer.encode(text).ids
    assert auto.eos_token == "<|im_end|>"
    assert auto.pad_token == "<|endoftext|>"


def test_special_tokens_have_the_published_order(tokenizer: Tokenizer) -> None:
    """They follow the learned entries in the order of the published checkpoints, at the same offsets."""
    base = tokenizer.get_vocab_size(with_added_tokens=False)
    offsets = {
        "<|endoftext|>": 0,
        "<|im_start|>": 1,
        "<|im_end|>": 2,
        "<|vision_start|>": 9,
        "<tool_call>": 14,
        "</tool_call>": 15,
        "<tool_response>": 22,
        "</tool_response>": 23,
        "<think>": 24,
        "</think>": 25,
    }
    assert {text: tokenizer.token_to_id(text) for text in offsets} == {
        t: base + o for t, o in offsets.items()
    }
    assert tokenizer.encode("a<think>b</think>").ids[1::2] == [base + 24, base + 25]


def test_the_vocabulary_has_padding_rows(tokenizer: Tokenizer) -> None:
    """As in published checkpoints, the table has rows that no text maps to, and every id has a row."""
    assert 4000 <= tokenizer.get_vocab_size() < read_config(tiny_folder()).vocab_size == 4096


def test_generation_ends_at_the_turn_or_the_text(tokenizer: Tokenizer) -> None:
    """generation_config.json names both ends and the padding token."""
    fields = json.loads((tiny_folder() / "generation_config.json").read_text(encoding="utf-8"))
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert fields["eos_token_id"] == ends
    assert fields["pad_token_id"] == ends[1]


@given(st.text(max_size=60))
def test_text_comes_back_from_its_ids(text: str) -> None:
    """Decoding the ids gives the NFC form of any text."""
    tokenizer = Tokenizer.from_file(str(tiny_folder() / "tokenizer.json"))
    normal = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == normal


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    """A number has one token a digit, so that arithmetic sees its places."""
    assert tokenizer.encode("20260").tokens == ["2", "0", "2", "6", "0"]


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("Hello, what is the answer to this question?", 10),
        ("    if value is None:\n        return result\n", 11),
        ('{"name": "get_weather", "arguments": {"path": null}}', 15),
        ("<tool_call>\n<function=get_weather>\n<parameter=path>\n", 10),
        ("<|im_start|>system\n<|im_end|>\n<|im_start|>assistant\n<think>\n", 10),
    ],
)
def test_the_texts_it_is_for_take_few_tokens(tokenizer: Tokenizer, text: str, most: int) -> None:
    """English, code, JSON and the chat frame are made of whole words."""
    assert len(tokenizer.encode(text).ids) <= most


def test_the_files_are_what_the_script_makes(make_tiny: ModuleType, tmp_path: Path) -> None:
    """A rerun gives the committed texts, and the same merges and vocabulary."""
    make_tiny.write_texts(tmp_path, make_tiny.SEED)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (tiny_folder() / name).read_bytes()
    made, kept = (
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        for folder in (tmp_path, tiny_folder())
    )
    assert made["model"]["merges"] == kept["model"]["merges"]
    assert made["model"]["vocab"] == kept["model"]["vocab"]
    assert made["added_tokens"] == kept["added_tokens"]


def test_weights_depend_on_the_seed_alone(make_tiny: ModuleType) -> None:
    """One seed gives one set of weights, another seed another."""
    weights = importlib.import_module("tiny_weights").tiny_weights
    small = parse_config(
        {**make_tiny.model_config(), "vocab_size": 64, "num_hidden_layers": 4, "layer_types": None}
    )
    first, again, other = (weights(small, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), documents=st.integers(1, 8))
def test_the_corpus_depends_on_the_seed_alone(seed: int, documents: int) -> None:
    """The same seed gives the same texts, and a longer corpus starts with the shorter one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        words = importlib.import_module("tiny_words").read_words(TOOLS / "tiny_words.txt")
        corpus = importlib.import_module("tiny_corpus").corpus
    short, long = list(corpus(words, seed, documents)), list(corpus(words, seed, documents + 3))
    assert long[:documents] == short
    assert all(text and "{n}" not in text for text in long)

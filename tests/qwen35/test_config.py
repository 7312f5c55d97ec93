"""Reading config.json: what is understood, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_qwen35.config import DenseFfn, LayerKind, MoeFfn, parse_config, read_config
from hpc_qwen35.errors import CheckpointError, ConfigError
from tests.qwen35.models import DENSE, MOE

PUBLISHED_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
    "text_config": {
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}


def without(raw: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != name}


def test_text_part_of_a_vision_checkpoint() -> None:
    """The text config of the 27B gives its sizes: 48 GDN and 16 attention layers, 64 rotated dimensions."""
    config = parse_config(PUBLISHED_27B)
    assert len(config.gdn_layers) == 48
    assert config.attention_layers == tuple(range(3, 64, 4))
    assert config.rotary_dim == 64
    assert config.conv_channels == 2 * 16 * 128 + 48 * 128
    assert config.ffn == DenseFfn(17408)
    assert config.addressable_vocab == config.vocab_size == 248320


def test_experts() -> None:
    """A MoE class has experts, and needs no dense size."""
    assert parse_config(MOE).ffn == MoeFfn(8, 3, 24, 32)


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_tied_at_either_level(outer: bool | None, inner: bool | None) -> None:
    """Embeddings are tied if either level says so."""
    text = {**without(PUBLISHED_27B["text_config"], "tie_word_embeddings"), "tie_word_embeddings": inner}
    raw = {**PUBLISHED_27B, "tie_word_embeddings": outer, "text_config": text}
    assert parse_config(raw).tie_word_embeddings is bool(outer or inner)


def test_layer_types_win_over_the_interval() -> None:
    """A list of kinds is taken as it stands."""
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    config = parse_config({**DENSE, "layer_types": kinds, "full_attention_interval": 2})
    assert config.layers == tuple(LayerKind(kind) for kind in kinds)


@pytest.mark.parametrize("name", ["Qwen4ExpForCausalLM", "LlamaForCausalLM", "Qwen3NextForCausalLM"])
def test_unknown_architectures_are_named(name: str) -> None:
    """The text says what was found and what is supported."""
    with pytest.raises(ConfigError, match=rf"{name}.*Qwen3_5ForCausalLM.*Qwen3_5MoeForConditionalGeneration"):
        parse_config({**DENSE, "architectures": [name]})


@pytest.mark.parametrize("found", [None, [], "Qwen3_5ForCausalLM", [1], ["Qwen3_5ForCausalLM", "Other"]])
def test_architectures_must_be_one_name(found: object) -> None:
    """No architecture, or several, is not guessed at."""
    with pytest.raises(ConfigError, match="architectures is"):
        parse_config({**DENSE, "architectures": found})


@pytest.mark.parametrize("level", ["outer", "inner"])
def test_quantised_checkpoints_are_refused(level: str) -> None:
    """quantization_config at either level is refused with its method."""
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    text = PUBLISHED_27B["text_config"]
    raw = (
        {**PUBLISHED_27B, **quantised}
        if level == "outer"
        else {**PUBLISHED_27B, "text_config": {**text, **quantised}}
    )
    with pytest.raises(ConfigError, match=r"quantised.*'fp8'.*bfloat16"):
        parse_config(raw)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3: must be a whole number from 4 to 4"),
        (
            {"num_attention_heads": 5},
            "num_attention_heads is 5: must be a multiple of num_key_value_heads, 2",
        ),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3: must be a multiple"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0: must be a number above"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* each of 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention'"),
        ({"rope_parameters": None}, "rope_parameters is None"),
        ({"rope_scaling": {"factor": 4}}, "rope_scaling is .* not supported"),
        ({"rope_theta": 5e6}, "rope_theta is 5000000.0: only 10000000.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: only 0.25"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': must be true or false"),
        ({"text_config": 3}, "text_config is 3"),
    ],
)
def test_unsupported_fields_are_named(change: dict[str, Any], text: str) -> None:
    """A field outside what is supported is named with its value and bound."""
    with pytest.raises(ConfigError, match=text):
        parse_config({**DENSE, **change})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_parameters.rope_type is 'yarn': only 'default'"),
        ({"type": "yarn", "factor": 4.0}, "rope_parameters.type is 'yarn': only 'default'"),
        ({"rope_theta": 0}, "rope_parameters.rope_theta is 0"),
        ({"rope_theta": None}, "rope_parameters.rope_theta is missing"),
        ({"partial_rotary_factor": 2}, "rope_parameters.partial_rotary_factor is 2"),
        ({"partial_rotary_factor": 0.2}, "rotates 3 of 16"),
        ({"mrope_section": [1, 1]}, "mrope_section is .1, 1.: must be three sizes that add up to 2"),
        ({"mrope_section": [2, 2, 2]}, "must be three sizes that add up to 2"),
        ({"mrope_section": "abc"}, "mrope_section is 'abc'"),
        ({"mrope_interleaved": False}, "mrope_interleaved is False"),
    ],
)
def test_unsupported_rope_is_named(change: dict[str, Any], text: str) -> None:
    """Scaled or malformed position encodings are refused, not approximated."""
    with pytest.raises(ConfigError, match=text):
        parse_config({**DENSE, "rope_parameters": {**DENSE["rope_parameters"], **change}})


SIZES = [name for name, value in DENSE.items() if type(value) is int and name != "linear_conv_kernel_dim"]


@given(name=st.sampled_from(SIZES), bad=st.sampled_from([0, -1, 1 << 40, 10**400, 2.5, True, "8", [], {}]))
def test_sizes_are_range_checked(name: str, bad: object) -> None:
    """Every size refuses zero, negatives, absurd values and anything that is no whole number, by its name."""
    with pytest.raises(ConfigError, match=name):
        parse_config({**DENSE, name: bad})


@given(name=st.sampled_from([n for n in SIZES if n != "max_position_embeddings"]))
def test_missing_sizes_are_named(name: str) -> None:
    """No size of the model is guessed when it is absent."""
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        parse_config(without(DENSE, name))


@pytest.mark.parametrize("bad", [0, 132, -1])
def test_addressable_vocab_is_range_checked(bad: int) -> None:
    """A tokenizer cannot have more ids than the embedding has rows."""
    assert parse_config(DENSE).with_addressable_vocab(100).addressable_vocab == 100
    with pytest.raises(ConfigError, match=f"has {bad} ids: .* 1 to 131"):
        parse_config(DENSE).with_addressable_vocab(bad)


def test_read_config(tmp_path: Path) -> None:
    """A folder's config.json reads as its parsed object does."""
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    assert read_config(tmp_path) == parse_config(MOE)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[]", "is a JSON list"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * (1 << 20) + b"{}", "at most 1048576 are read"),
        (b'{"architectures": ["Llama"]}', r"config.json: architecture 'Llama'"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, text: str) -> None:
    """Anything but a small JSON object of a known kind is a ConfigError that names the file."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        read_config(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    """A folder without config.json says so."""
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path)


def test_link_out_of_the_folder(tmp_path: Path) -> None:
    """A config.json that leads out of the model folder is not followed."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "elsewhere.json").write_text(json.dumps(DENSE))
    (folder / "config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match="outside the model folder"):
        read_config(folder)

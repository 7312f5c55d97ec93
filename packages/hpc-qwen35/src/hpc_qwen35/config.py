"""The shape of a Qwen3.5 text model, read from a checkpoint's config.json and checked.

Read are `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`, and the text part of the two
`…ForConditionalGeneration` classes. Anything else is refused by name: a config that is nearly right would
give a model that is quietly wrong.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import attrs

from hpc_qwen35.errors import ConfigError
from hpc_qwen35.fields import Fields
from hpc_qwen35.files import model_file

__all__ = ["DenseFfn", "Ffn", "LayerKind", "MoeFfn", "Qwen35Config", "parse_config", "read_config"]

_ARCHITECTURES = {
    "Qwen3_5ForCausalLM": False,
    "Qwen3_5ForConditionalGeneration": False,
    "Qwen3_5MoeForCausalLM": True,
    "Qwen3_5MoeForConditionalGeneration": True,
}  # name: has experts

_MAX_FILE = 1 << 20  # bytes of config.json; published ones have a few thousand
_MAX_SIZE = 1 << 20  # of any one dimension
_CONV_WIDTH = 4


class LayerKind(enum.Enum):
    """What mixes tokens in a layer."""

    GDN = "linear_attention"
    ATTENTION = "full_attention"


@attrs.frozen
class DenseFfn:
    """One SwiGLU block."""

    intermediate_size: int


@attrs.frozen
class MoeFfn:
    """Routed SwiGLU experts and one that always runs, scaled by its own gate."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int


Ffn: TypeAlias = DenseFfn | MoeFfn


@attrs.frozen
class Qwen35Config:
    """Sizes of a text model, under the names of the published files where they have one.

    rotary_dim: leading dimensions of an attention head that are rotated.
    linear_*: heads and head sizes of the GDN layers. conv_width: columns of the causal convolution.
    addressable_vocab: token ids are [0, addressable_vocab); rows of the head beyond it are padding and
        never chosen. The tokenizer knows it; a config alone means vocab_size.
    """

    architecture: str
    vocab_size: int
    addressable_vocab: int
    hidden_size: int
    layers: tuple[LayerKind, ...]
    ffn: Ffn
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_width: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Numbers of the GDN layers, in model order."""
        return tuple(i for i, kind in enumerate(self.layers) if kind is LayerKind.GDN)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the full-attention layers, in model order."""
        return tuple(i for i, kind in enumerate(self.layers) if kind is LayerKind.ATTENTION)

    @property
    def conv_channels(self) -> int:
        """Channels that the convolution mixes over time: q, k and v of a GDN layer, in that order."""
        keys = 2 * self.linear_num_key_heads * self.linear_key_head_dim
        return keys + self.linear_num_value_heads * self.linear_value_head_dim

    def with_addressable_vocab(self, size: int) -> Qwen35Config:
        """The same model whose tokenizer has `size` ids.

        Raises:
            ConfigError: size is not in [1, vocab_size].
        """
        if not 1 <= size <= self.vocab_size:
            raise ConfigError(
                f"the tokenizer has {size} ids: the model's vocabulary is 1 to {self.vocab_size}"
            )
        return attrs.evolve(self, addressable_vocab=size)


def read_config(folder: Path) -> Qwen35Config:
    """The config of a model folder.

    Raises:
        ConfigError: config.json is missing, no JSON object, or not one of the supported models.
        CheckpointError: config.json is a link out of the folder.
    """
    path = model_file(folder, "config.json")
    if path is None:
        raise ConfigError(f"{folder} has no config.json")
    if path.stat().st_size > _MAX_FILE:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes: at most {_MAX_FILE} are read")
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is a JSON {type(data).__name__}, not an object")
    try:
        return parse_config(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(data: Mapping[str, object]) -> Qwen35Config:
    """The config in a parsed config.json.

    Raises:
        ConfigError: the text names the field, the value and what is supported.
    """
    architecture, has_experts = _architecture(data)
    _refuse_quantised(data)
    inner = data.get("text_config", data)
    if not isinstance(inner, dict):
        raise ConfigError(f"text_config is {inner!r}, not an object")
    _refuse_quantised(inner)
    text = Fields(inner)
    text.require("hidden_act", "silu")
    text.require("attention_bias", False)
    text.require("attn_output_gate", True)
    text.require("mamba_ssm_dtype", "float32")
    vocab = text.whole("vocab_size", 2, 1 << 24)
    head_dim = text.whole("head_dim", 2, 1 << 14)
    rotary_dim, theta = _rope(text, head_dim)
    heads = text.whole("num_attention_heads", 1, 1 << 14)
    kv_heads = text.whole("num_key_value_heads", 1, 1 << 14)
    key_heads = text.whole("linear_num_key_heads", 1, 1 << 14)
    value_heads = text.whole("linear_num_value_heads", 1, 1 << 14)
    for name, many, few_name, few in (
        ("num_attention_heads", heads, "num_key_value_heads", kv_heads),
        ("linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads),
    ):
        if many % few:
            raise ConfigError(f"{name} is {many}: must be a multiple of {few_name}, {few}")
    return Qwen35Config(
        architecture=architecture,
        vocab_size=vocab,
        addressable_vocab=vocab,
        hidden_size=text.whole("hidden_size", 1, _MAX_SIZE),
        layers=_layers(text),
        ffn=_ffn(text, has_experts),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=text.whole("linear_key_head_dim", 1, 1 << 14),
        linear_value_head_dim=text.whole("linear_value_head_dim", 1, 1 << 14),
        conv_width=text.whole("linear_conv_kernel_dim", _CONV_WIDTH, _CONV_WIDTH, default=_CONV_WIDTH),
        rms_norm_eps=text.real("rms_norm_eps", 0.0, 1.0, default=1e-6),
        max_position_embeddings=text.whole("max_position_embeddings", 1, 1 << 31, default=32768),
        tie_word_embeddings=_tied(data, inner),
    )


def _architecture(data: Mapping[str, object]) -> tuple[str, bool]:
    found = data.get("architectures")
    supported = ", ".join(_ARCHITECTURES)
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str):
        raise ConfigError(f"architectures is {found!r}: must name one of {supported}")
    name = found[0]
    if name not in _ARCHITECTURES:
        raise ConfigError(f"architecture {name!r} is not supported; supported: {supported}")
    return name, _ARCHITECTURES[name]


def _refuse_quantised(data: Mapping[str, object]) -> None:
    found = data.get("quantization_config")
    if found is None:
        return
    method = found.get("quant_method") if isinstance(found, dict) else None
    raise ConfigError(
        f"this checkpoint is quantised (quantization_config, method {method!r}): only weights in "
        "float32, bfloat16 or float16 are supported"
    )


def _tied(outer: Mapping[str, object], inner: Mapping[str, object]) -> bool:
    """The flag stands at either level of a checkpoint with a text_config; False is the default of both."""
    return any(Fields(level).flag("tie_word_embeddings", default=False) for level in (outer, inner))


def _layers(text: Fields) -> tuple[LayerKind, ...]:
    count = text.whole("num_hidden_layers", 1, 4096)
    names = text.value("layer_types")
    if names is None:
        interval = text.whole("full_attention_interval", 1, 4096, default=4)
        kinds = (LayerKind.GDN, LayerKind.ATTENTION)
        return tuple(kinds[(i + 1) % interval == 0] for i in range(count))
    known = {kind.value: kind for kind in LayerKind}
    if not isinstance(names, list) or len(names) != count:
        raise ConfigError(f"layer_types is {names!r}: must name the kind of each of {count} layers")
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ConfigError(f"layer_types has {name!r}; supported: {', '.join(known)}")
    return tuple(known[name] for name in names)


def _ffn(text: Fields, has_experts: bool) -> Ffn:
    if not has_experts:
        return DenseFfn(text.whole("intermediate_size", 1, _MAX_SIZE))
    experts = text.whole("num_experts", 1, 1 << 14)
    return MoeFfn(
        num_experts=experts,
        num_experts_per_tok=text.whole("num_experts_per_tok", 1, experts),
        intermediate_size=text.whole("moe_intermediate_size", 1, _MAX_SIZE),
        shared_intermediate_size=text.whole("shared_expert_intermediate_size", 1, _MAX_SIZE),
    )


def _rope(text: Fields, head_dim: int) -> tuple[int, float]:
    """(rotated dimensions, theta). Text positions are the same on all three axes of the interleaved form."""
    raw = text.value("rope_parameters")
    if not isinstance(raw, dict):
        raise ConfigError(f"rope_parameters is {raw!r}: must be an object with rope_theta")
    if text.value("rope_scaling") is not None:
        raise ConfigError(
            f"rope_scaling is {text.value('rope_scaling')!r}: scaled positions are not supported"
        )
    rope = Fields(raw, "rope_parameters.")
    rope.require("rope_type", "default")
    rope.require("type", "default")  # its older name
    rope.require("mrope_interleaved", True)
    theta = rope.real("rope_theta", 1.0, 1e12)
    factor = rope.real("partial_rotary_factor", 0.0, 1.0, default=0.25)
    # Older files have them one level up. What is not read must not say otherwise.
    text.require("rope_theta", theta)
    text.require("partial_rotary_factor", factor)
    rotary_dim = math.floor(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"rope_parameters.partial_rotary_factor is {factor}: it rotates {rotary_dim} of {head_dim} "
            "dimensions, and that must be an even number of at least 2"
        )
    section = rope.value("mrope_section")
    if section is not None:
        sizes = [n for n in section if type(n) is int and n >= 0] if isinstance(section, list) else []
        if sizes != section or len(sizes) != 3 or sum(sizes) != rotary_dim // 2:
            raise ConfigError(
                f"rope_parameters.mrope_section is {section!r}: "
                f"must be three sizes that add up to {rotary_dim // 2}"
            )
    return rotary_dim, theta

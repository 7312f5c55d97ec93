"""Small random models for tests, and the same model in transformers as the oracle."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from hpc_qwen35.config import MoeFfn, Qwen35Config, parse_config
from hpc_qwen35.init import initialise
from hpc_qwen35.kv_pool import KvPool
from hpc_qwen35.model import Qwen35Model
from hpc_qwen35.state_pool import StatePool
from hpc_qwen35.weights import fuse_tensors

CPU = torch.device("cpu")
PAGES, SLOTS = 24, 6

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}

MOE: dict[str, Any] = {
    **{name: value for name, value in DENSE.items() if name != "intermediate_size"},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}


def config_of(raw: dict[str, Any], **changes: object) -> Qwen35Config:
    """A config from raw fields, some of them changed."""
    return parse_config({**raw, **changes})


def random_tensors(config: Qwen35Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights under checkpoint names, no norm left neutral: one applied in the wrong form must show."""
    generator = torch.Generator().manual_seed(seed)
    tensors = initialise(config, generator)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.2)
    return tensors


def build(
    config: Qwen35Config,
    tensors: dict[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    kv: str = "fp32",
) -> Qwen35Model:
    """A model with PAGES pages and SLOTS slots, all of them filled with garbage but slot 0 to 3."""
    pool, states = KvPool(config, kv, PAGES, CPU), StatePool(config, SLOTS, CPU, dtype)
    for pages in pool.layers:
        pages.fill_(torch.nan)
    states.bytes[4:].fill_(255)
    return Qwen35Model(config, fuse_tensors(config, tensors, CPU, dtype), pool, states)


def oracle(config: Qwen35Config, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """transformers' model with the same weights, FP32."""
    moe = isinstance(config.ffn, MoeFfn)
    fields = {name: value for name, value in raw.items() if name != "architectures"}
    if moe:
        model: PreTrainedModel = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**fields))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields))
    if config.tie_word_embeddings:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    result = model.load_state_dict(tensors)
    if result.missing_keys or result.unexpected_keys:
        raise ValueError(f"weights do not fit the oracle: {result}")
    model.train(False)
    return model


def oracle_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """FP32 [T, vocab] of one pass without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens[None]).logits[0]
    return logits


def random_tokens(config: Qwen35Config, count: int, seed: int = 1) -> torch.Tensor:
    """Integers [count] over the whole vocabulary."""
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@attrs.frozen(eq=False)
class Run:
    """One sequence on a model: its slot and pages."""

    model: Qwen35Model
    slot: int
    row: torch.Tensor

    def prefill(self, tokens: torch.Tensor, cuts: list[int], base: int = 0) -> torch.Tensor:
        """Process tokens [base, len) cut at `cuts`; the last logits [vocab]."""
        ends = [cut for cut in cuts if base < cut < len(tokens)] + [len(tokens)]
        for end in ends:
            hidden = self.model.prefill(tokens[base:end], base, self.slot, self.row)
            base = end
        return self.model.logits(hidden[None])[0]

    def decode(self, tokens: torch.Tensor, base: int) -> torch.Tensor:
        """Process tokens [base, len) one by one; logits [len - base, vocab]."""
        return torch.cat(
            [
                self.model.logits(self.model.decode(tokens[t : t + 1], [t], [self.slot], [self.row]))
                for t in range(base, len(tokens))
            ]
        )

    def clear(self) -> None:
        """Back to the state before any token; what is read of an old page must show."""
        self.model.states.bytes[self.slot].zero_()
        for pages in self.model.kv.layers:
            pages[self.row] = torch.nan

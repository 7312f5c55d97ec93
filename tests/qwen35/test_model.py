"""Logits of the whole model against transformers on small random configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc_qwen35.config import parse_config
from hpc_qwen35.errors import ConfigError
from hpc_qwen35.kv_pool import KvPool
from hpc_qwen35.model import Qwen35Model, Tokens
from hpc_qwen35.state_pool import StatePool
from hpc_qwen35.weights import fuse_tensors
from tests.qwen35.models import (
    CPU,
    DENSE,
    MOE,
    PAGES,
    SLOTS,
    Run,
    build,
    config_of,
    oracle,
    oracle_logits,
    random_tensors,
    random_tokens,
)

EXACT = 1e-4  # largest difference of a logit, FP32 with FP32 KV
ROW = torch.tensor([7, 3, 11, 0, 5])

SHAPES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "moe": MOE,
    "tied": {**DENSE, "tie_word_embeddings": True},
    "three value heads a key head": {**DENSE, "linear_num_value_heads": 6},
    "as many key as value heads": {**DENSE, "linear_num_key_heads": 4},
    "one key head": {**DENSE, "num_attention_heads": 6, "num_key_value_heads": 1, "linear_num_key_heads": 1},
    "no grouped queries": {**DENSE, "num_key_value_heads": 4},
    "unequal GDN head sizes": {**DENSE, "linear_key_head_dim": 8, "linear_value_head_dim": 24},
    "last layer GDN": {**DENSE, "num_hidden_layers": 5},
    "all layers attention": {**DENSE, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2},
    "moe, tied": {**MOE, "tie_word_embeddings": True, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(shape: str) -> None:
    """One prefill, odd chunks and decode all give transformers' logits, at lengths about the grid of 64."""
    raw = SHAPES[shape]
    config = config_of(raw)
    tensors = random_tensors(config)
    model, tokens = build(config, tensors), random_tokens(config, 300)
    expected = oracle_logits(oracle(config, raw, tensors), tokens)
    run = Run(model, 2, ROW)
    for n in (1, 2, 63, 64, 65, 130, 300):
        run.clear()
        assert (run.prefill(tokens[:n], []) - expected[n - 1]).abs().max() <= EXACT
    run.clear()
    assert (run.prefill(tokens[:270], [1, 38, 101, 102, 199]) - expected[269]).abs().max() <= EXACT
    assert (run.decode(tokens, 270) - expected[270:]).abs().max() <= EXACT


@pytest.mark.parametrize("raw", [DENSE, MOE], ids=["dense", "moe"])
def test_decode_from_the_first_token(raw: dict[str, Any]) -> None:
    """A sequence that never saw a prefill decodes to transformers' logits."""
    config = config_of(raw)
    tensors = random_tensors(config)
    tokens = random_tokens(config, 70)
    expected = oracle_logits(oracle(config, raw, tensors), tokens)
    assert (Run(build(config, tensors), 1, ROW).decode(tokens, 0) - expected).abs().max() <= EXACT


def test_bf16_kv_error_is_small() -> None:
    """BF16 KV in an FP32 model moves a logit by at most 0.001, measured where their deviation is 1.0."""
    config = config_of(DENSE)
    tensors = random_tensors(config)
    tokens = random_tokens(config, 300)
    expected = oracle_logits(oracle(config, DENSE, tensors), tokens)[-1]
    error = (Run(build(config, tensors, kv="bf16"), 0, ROW).prefill(tokens, [128]) - expected).abs().max()
    assert EXACT < error < 0.002


def test_bf16_model_follows_fp32() -> None:
    """Computed in BF16 throughout, logits differ from FP32's by 2 to 4 % (root mean square), measured.

    Not so with experts: a router's near ties fall to another expert, and a small random model feels each.
    """
    config = config_of(DENSE)
    tensors = random_tensors(config)
    tokens = random_tokens(config, 200)
    expected = oracle_logits(oracle(config, DENSE, tensors), tokens)[-1]
    run = Run(build(config, tensors, dtype=torch.bfloat16, kv="bf16"), 0, ROW)
    error = run.prefill(tokens, [77]) - expected
    assert error.square().mean().sqrt() < 0.1 * expected.square().mean().sqrt()


def test_padding_of_the_head_is_never_likely() -> None:
    """Ids that no token has come out as -inf, the others as they are."""
    config = config_of(DENSE)
    tensors = random_tensors(config)
    hidden = torch.randn(2, config.hidden_size, generator=torch.Generator().manual_seed(3))
    whole = build(config, tensors).logits(hidden)
    part = build(config.with_addressable_vocab(100), tensors).logits(hidden)
    assert torch.equal(part[:, :100], whole[:, :100])
    assert (part[:, 100:] == -torch.inf).all()


def test_token_forms() -> None:
    """Tokens may come as a list, as int32 from the index, or as a tensor."""
    config = config_of(DENSE)
    model = build(config, random_tensors(config))
    tokens = random_tokens(config, 5)
    forms: tuple[Tokens, ...] = (tokens, tokens.tolist(), tokens.to(torch.int32).numpy())
    outs = [model.prefill(form, 0, slot, ROW) for slot, form in enumerate(forms)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_misuse_is_named() -> None:
    """No tokens, a row too short, a slot out of range or used twice: the text says which."""
    config = config_of(DENSE)
    model = build(config, random_tensors(config))
    with pytest.raises(ValueError, match="one token or more"):
        model.prefill([], 0, 0, ROW)
    with pytest.raises(ValueError, match=r"tokens \[60, 70\), 1 pages: .* 2 pages"):
        model.prefill([1] * 10, 60, 0, ROW[:1])
    with pytest.raises(ValueError, match=r"slot is 6: must be 0 to 5"):
        model.prefill([1], 0, SLOTS, ROW)
    with pytest.raises(ValueError, match=r"slots \[1, 1\]"):
        model.decode([1, 2], [3, 4], [1, 1], [ROW, ROW])


def test_experts_that_cannot_run_are_refused_at_build() -> None:
    """Expert sizes that the grouped product cannot take fail when the model is built, not in a request."""
    config = parse_config({**MOE, "moe_intermediate_size": 22})
    weights = fuse_tensors(config, random_tensors(config), CPU, torch.float32)
    with pytest.raises(ConfigError, match="expert intermediate size 22 is not a multiple of 4"):
        Qwen35Model(
            config, weights, KvPool(config, "fp32", PAGES, CPU), StatePool(config, 1, CPU, torch.float32)
        )


def test_images_must_keep_the_compute_dtype() -> None:
    """A state pool for another compute dtype would round a live state, and is refused."""
    config = config_of(DENSE)
    weights = fuse_tensors(config, random_tensors(config), CPU, torch.float32)
    with pytest.raises(ValueError, match=r"must be torch\.float32"):
        Qwen35Model(
            config, weights, KvPool(config, "fp32", PAGES, CPU), StatePool(config, 1, CPU, torch.bfloat16)
        )

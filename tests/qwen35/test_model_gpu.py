"""The same model on a GPU: the same operators, other libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc_qwen35.kv_pool import KvPool
from hpc_qwen35.model import Qwen35Model
from hpc_qwen35.state_pool import StatePool
from hpc_qwen35.weights import fuse_tensors
from tests.qwen35.models import DENSE, MOE, PAGES, SLOTS, Run, build, config_of, random_tensors, random_tokens

pytestmark = pytest.mark.gpu


def on_gpu(raw: dict[str, Any], dtype: torch.dtype, kv: str) -> Qwen35Model:
    config, device = config_of(raw), torch.device("cuda")
    weights = fuse_tensors(config, random_tensors(config), device, dtype)
    return Qwen35Model(
        config, weights, KvPool(config, kv, PAGES, device), StatePool(config, SLOTS, device, dtype)
    )


@pytest.mark.parametrize("raw", [DENSE, MOE], ids=["dense", "moe"])
def test_logits_equal_the_cpu(raw: dict[str, Any]) -> None:
    """FP32 prefill in chunks and decode give the CPU's logits, on rows of ids on either device."""
    config = config_of(raw)
    tokens, row = random_tokens(config, 300), torch.tensor([7, 3, 11, 0, 5])
    cpu = Run(build(config, random_tensors(config)), 0, row)
    gpu = Run(on_gpu(raw, torch.float32, "fp32"), 1, row.cuda())
    assert (
        gpu.prefill(tokens[:280], [65, 130]).cpu() - cpu.prefill(tokens[:280], [65, 130])
    ).abs().max() < 1e-3
    assert (gpu.decode(tokens, 280).cpu() - cpu.decode(tokens, 280)).abs().max() < 1e-3


@pytest.mark.parametrize("raw", [DENSE, MOE], ids=["dense", "moe"])
def test_bf16_runs_and_repeats(raw: dict[str, Any]) -> None:
    """BF16 with BF16 KV: finite, and the same bits in another slot and other pages."""
    model = on_gpu(raw, torch.bfloat16, "bf16")
    tokens = random_tokens(model.config, 150)
    runs = [Run(model, 0, torch.tensor([0, 1, 2])), Run(model, 3, torch.tensor([9, 4, 8]))]
    results = [(run.prefill(tokens[:140], [70]), run.decode(tokens, 140)) for run in runs]
    assert results[0][0].isfinite().all()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])

"""Random but sane weights under the names of a checkpoint: for tests, and for a model yet to be trained."""

from __future__ import annotations

import math

import torch

from hpc_qwen35.config import Qwen35Config
from hpc_qwen35.names import expected_tensors

__all__ = ["initialise"]

_RESIDUAL = ("self_attn.o_proj.weight", "linear_attn.out_proj.weight", "down_proj.weight", "down_proj")
_STEP_RANGE = (1e-3, 1e-1)  # of softplus(dt_bias): how much of its decay a head applies a token
_DECAY_RANGE = (1.0, 16.0)  # of exp(A_log)


def initialise(config: Qwen35Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """FP32 tensors of a whole model by their name in a text-only checkpoint (prefix `model.`), on the CPU.

    Projections keep the variance of their input; those that write to the residual stream are smaller by
    the square root of twice the number of layers. Norms that multiply by 1 + w start at 0, the one inside
    GDN, which multiplies by w, at 1. The same generator state gives the same tensors.
    """
    residual = 1.0 / math.sqrt(2 * len(config.layers))
    tensors = {}
    for name, shape in expected_tensors(config).items():
        full = name if name == "lm_head.weight" else f"model.{name}"
        tensors[full] = _tensor(name, shape, residual, generator)
    return tensors


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator) * (high - low) + low


def _tensor(name: str, shape: tuple[int, ...], residual: float, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("A_log"):
        return _uniform(shape, *_DECAY_RANGE, generator).log_()
    if name.endswith("dt_bias"):
        low, high = (math.log(step) for step in _STEP_RANGE)
        step = _uniform(shape, low, high, generator).exp_()
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    if name.endswith("linear_attn.norm.weight"):
        return torch.ones(shape)
    if name.endswith("norm.weight"):
        return torch.zeros(shape)
    scale = 1.0 / math.sqrt(shape[-1])
    if name.endswith(_RESIDUAL):
        scale *= residual
    return torch.randn(shape, generator=generator).mul_(scale)

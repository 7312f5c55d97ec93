"""Random weights of the tiny model: not trained, but in the range in which every part of the model matters.

A tied model that is initialised for training repeats its input and chooses almost uniformly. This one is
moved to where an untrained model tells right reuse from wrong: its layers outweigh the embedding in the
residual stream, its attention looks at some tokens more than at others, and its output is peaked.
"""

from __future__ import annotations

import math

import torch

from hpc_qwen35.config import Qwen35Config
from hpc_qwen35.init import initialise

__all__ = ["tiny_weights"]

_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
_ATTENTION = ("q_norm.weight", "k_norm.weight")
_ATTENTION_SHARPER = 0.5
_OUTPUT_SHARPER = 2.0
_NORM_JITTER = 0.05
"""No norm is left at its neutral weight: one that is forgotten or applied in the wrong form must show."""


def tiny_weights(config: Qwen35Config, seed: int) -> dict[str, torch.Tensor]:
    """BF16 tensors by their name in the checkpoint; one seed gives the same bytes on one machine."""
    generator = torch.Generator().manual_seed(seed)
    tensors = initialise(config, generator)
    unshrink = math.sqrt(2 * len(config.layers))
    for name in sorted(tensors):
        tensor = tensors[name]
        if name.endswith(_RESIDUAL):
            tensor.mul_(unshrink)
        if name.endswith("norm.weight"):
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=_NORM_JITTER)
        if name.endswith(_ATTENTION):
            tensor.add_(_ATTENTION_SHARPER)
        if name == "model.norm.weight":
            tensor.add_(_OUTPUT_SHARPER)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}

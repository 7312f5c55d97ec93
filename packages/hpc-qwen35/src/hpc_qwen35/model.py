"""The forward pass of a Qwen3.5 text model over a KV pool and state slots.

Everything that a pass reads of earlier tokens lies in the lane's KV pages and in its slot (§3.2); everything
else is a temporary, freed on return. The same call on the same bytes gives the same bits, whatever the
numbers of pages and slot are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs
import numpy as np
import torch

from hpc_index.ids import Int32Buffer
from hpc_kernels.linear import Gemm, linear, select_gemm
from hpc_kernels.moe import check_experts
from hpc_kernels.rms_norm import rms_norm
from hpc_kernels.rotary import inverse_frequencies
from hpc_qwen35.config import MoeFfn, Qwen35Config
from hpc_qwen35.errors import ConfigError
from hpc_qwen35.kv_pool import KvPool
from hpc_qwen35.kv_profiles import BLOCK
from hpc_qwen35.layers import Attention, Ffn, GatedDeltaNet, Mixer, ffn_block
from hpc_qwen35.passes import DecodePass, PrefillPass
from hpc_qwen35.state_pool import StatePool
from hpc_qwen35.tensors import named_tensors
from hpc_qwen35.weights import AttentionWeights, MixerWeights, Qwen35Weights

__all__ = ["Layer", "Qwen35Model", "Tokens"]

Tokens: TypeAlias = torch.Tensor | Int32Buffer | Sequence[int]
"""Token ids, one-dimensional, each in [0, vocab_size)."""


@attrs.frozen(eq=False)
class Layer:
    """x += mixer(norm(x)); x += ffn(norm(x))."""

    input_norm: torch.Tensor
    mixer: Mixer
    post_norm: torch.Tensor
    ffn: Ffn


@attrs.define(eq=False)
class Qwen35Model:
    """A model bound to its pools, all on one device. For one thread: it updates pages and slots in place.

    constants: the small tensors that a pass reads besides weights, pages and images, by name.

    Raises:
        ConfigError: the experts' sizes cannot run in the compute dtype.
        ValueError: the images keep conv columns in another dtype than the model computes in.
    """

    config: Qwen35Config
    weights: Qwen35Weights
    kv: KvPool
    states: StatePool
    gemm: Gemm = attrs.field(init=False)
    constants: dict[str, torch.Tensor] = attrs.field(init=False)
    layers: tuple[Layer, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        config, weights = self.config, self.weights
        if isinstance(config.ffn, MoeFfn):
            try:
                check_experts(weights.dtype, config.hidden_size, config.ffn.intermediate_size)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        if self.states.conv_dtype != weights.dtype:
            raise ValueError(
                f"state images keep {self.states.conv_dtype} columns: must be {weights.dtype}, as computed"
            )
        self.gemm = select_gemm(weights.device, weights.dtype)
        heads = config.linear_num_key_heads
        qk_scale = torch.ones(2 * heads, 1, device=weights.device)
        qk_scale[:heads] = config.linear_key_head_dim**-0.5
        inverse = inverse_frequencies(config.rotary_dim, config.rope_theta, weights.device)
        self.constants = {"inverse_frequencies": inverse, "qk_scale": qk_scale}
        pages = dict(zip(config.attention_layers, self.kv.layers, strict=True))
        top = config.ffn.num_experts_per_tok if isinstance(config.ffn, MoeFfn) else 0
        self.layers = tuple(
            Layer(
                layer.input_norm,
                self._mixer(number, layer.mixer, pages),
                layer.post_norm,
                ffn_block(layer.ffn, top, self.gemm),
            )
            for number, layer in enumerate(weights.layers)
        )

    def _mixer(self, number: int, weights: MixerWeights, pages: dict[int, torch.Tensor]) -> Mixer:
        if isinstance(weights, AttentionWeights):
            return Attention(weights, pages[number], self.config, self.gemm)
        conv, recurrent = (self.states.views[name, number] for name in ("conv", "recurrent"))
        return GatedDeltaNet(weights, conv, recurrent, self.constants["qk_scale"], self.config, self.gemm)

    @torch.inference_mode()
    def prefill(self, tokens: Tokens, base: int, slot: int, row: torch.Tensor) -> torch.Tensor:
        """Process tokens [base, base + T) of one lane; the last one's hidden [H] after the final norm.

        tokens: [T], T >= 1. row: integers, the pages of at least
        ceil((base + T) / 64) blocks; those of [base, base + T) are written. The slot's state must be the
        one after `base` tokens; it moves to base + T, its hidden part included.

        Raises:
            ValueError: no tokens, base or slot out of range, or a row too short.
        """
        count = len(tokens)
        self._check(base, count, slot, row)
        at = PrefillPass.of(base, count, slot, row, self.constants["inverse_frequencies"])
        x = self._embed(tokens)
        for layer in self.layers[:-1]:
            x = self._layer(layer, x, layer.mixer.prefill(self._norm(x, layer.input_norm), at, False))
        layer = self.layers[-1]
        x = self._layer(layer, x[-1:], layer.mixer.prefill(self._norm(x, layer.input_norm), at, True))
        hidden = self._norm(x, self.weights.norm)[0]
        self.states.views["hidden", -1][slot] = hidden
        return hidden

    @torch.inference_mode()
    def decode(
        self,
        tokens: Tokens,
        positions: Sequence[int],
        slots: Sequence[int],
        rows: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Process one token of each of B lanes; hidden [B, H] after the final norm, also left in the slots.

        tokens: [B]. Lane b's token stands at positions[b], its state is in slots[b] (all
        different), its pages are in rows[b]. A lane's values do not depend on the other lanes' content;
        they may depend in the last bits on B.

        Raises:
            ValueError: lengths that differ, a slot twice, or one out of range.
        """
        B = len(tokens)
        if not 1 <= B == len(positions) == len(slots) == len(rows) or len(set(slots)) != B:
            raise ValueError(
                f"{B} tokens, {len(positions)} positions, {len(rows)} rows, slots {list(slots)}: "
                "must be as many of each, and no slot twice"
            )
        for position, slot, row in zip(positions, slots, rows, strict=True):
            self._check(position, 1, slot, row)
        at = DecodePass.of(list(positions), list(slots), list(rows), self.constants["inverse_frequencies"])
        x = self._embed(tokens)
        for layer in self.layers:
            x = self._layer(layer, x, layer.mixer.decode(self._norm(x, layer.input_norm), at))
        hidden = self._norm(x, self.weights.norm)
        self.states.views["hidden", -1].index_copy_(0, at.slots, hidden)
        return hidden

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that a pass reads besides KV pages and state images, by name."""
        return {**named_tensors("weights", self.weights), **named_tensors("constants", self.constants)}

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """FP32 [B, vocab_size] of hidden [B, H]; -inf for ids from addressable_vocab on."""
        logits = linear(hidden, self.weights.head, self.gemm).float()
        if self.config.addressable_vocab < self.config.vocab_size:
            logits[:, self.config.addressable_vocab :] = -torch.inf
        return logits

    def _embed(self, tokens: Tokens) -> torch.Tensor:
        if not isinstance(tokens, torch.Tensor):
            tokens = torch.from_numpy(np.array(tokens, dtype=np.int64))
        ids = tokens.to(device=self.weights.device, dtype=torch.int64)
        return self.weights.embedding.index_select(0, ids)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def _layer(self, layer: Layer, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = mixed.add_(x)
        return layer.ffn(self._norm(x, layer.post_norm)).add_(x)

    def _check(self, base: int, count: int, slot: int, row: torch.Tensor) -> None:
        blocks = -(-(base + count) // BLOCK)
        if count < 1 or base < 0 or row.shape[0] < blocks:
            raise ValueError(
                f"tokens [{base}, {base + count}), {row.shape[0]} pages: must be one token or more, from 0"
                f" on, and {blocks} pages"
            )
        if not 0 <= slot < self.states.slots:
            raise ValueError(f"slot is {slot}: must be 0 to {self.states.slots - 1}")

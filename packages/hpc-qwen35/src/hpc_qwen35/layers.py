"""The blocks of a layer: gated attention, Gated DeltaNet, feed-forward. Each has a prefill and a decode form.

Prefill takes the T tokens of one lane, decode one token of each of B lanes. A mixer reads and writes what
earlier tokens left: attention its KV pages, GDN its slot's conv and recurrent parts, and nothing else.
With `last_only` a mixer takes in all T tokens and puts out only the last one's row: after the last layer
nobody reads the others.
"""

from __future__ import annotations

import attrs
import torch

from hpc_kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from hpc_kernels.gated_delta_rule import CHUNK, chunk_gated_delta_rule, gates, step_gated_delta_rule
from hpc_kernels.kv_append import kv_append
from hpc_kernels.linear import Gemm, linear
from hpc_kernels.moe import GATHERED_TOKENS, gathered_experts, grouped_experts, route
from hpc_kernels.paged_attention import paged_decode, paged_prefill
from hpc_kernels.rms_norm import gated_rms_norm, l2_norm, rms_norm
from hpc_kernels.rotary import apply_rotary
from hpc_kernels.swiglu import swiglu
from hpc_qwen35.config import Qwen35Config
from hpc_qwen35.passes import DecodePass, PrefillPass, RotaryTable
from hpc_qwen35.weights import AttentionWeights, DenseWeights, FfnWeights, GdnWeights, MoeWeights

__all__ = ["Attention", "DenseBlock", "Ffn", "GatedDeltaNet", "Mixer", "MoeBlock", "ffn_block"]

_L2_EPS = 1e-6


@attrs.frozen(eq=False)
class Attention:
    """Gated full attention with grouped query heads. pages: this layer's, [P, BLOCK, 2, HK, D]."""

    weights: AttentionWeights
    pages: torch.Tensor
    config: Qwen35Config
    gemm: Gemm

    def prefill(self, x: torch.Tensor, at: PrefillPass, last_only: bool) -> torch.Tensor:
        """[T, H] -> [T, H], or [1, H] of the last token. Appends T tokens to the pages."""
        if last_only and x.shape[0] > 1:
            self._append_only(x[:-1], at)
            x, rotary, cells, base = x[-1:], at.last_rotary, at.cells[-1:], at.base + x.shape[0] - 1
        else:
            rotary, cells, base = at.rotary, at.cells, at.base
        q, gate = self._append(x, rotary, cells)
        out = paged_prefill(q, self.pages, at.row, base, self._scale)
        return self._project(out, gate)

    def decode(self, x: torch.Tensor, at: DecodePass) -> torch.Tensor:
        """[B, H] -> [B, H]. Appends one token to each lane's pages."""
        q, gate = self._append(x, at.rotary, at.cells)
        return self._project(paged_decode(q, self.pages, at.rows, at.lengths, self._scale), gate)

    @property
    def _scale(self) -> float:
        return float(self.config.head_dim**-0.5)

    def _append(
        self, x: torch.Tensor, rotary: RotaryTable, cells: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(q [T, HQ, D], normed and rotated; gate [T, HQ D]); keys and values go to the pages."""
        c, w = self.config, self.weights
        T, D, HQ, HK = x.shape[0], c.head_dim, c.num_attention_heads, c.num_key_value_heads
        qkv, gate = torch.split(linear(x, w.in_proj, self.gemm), [(HQ + 2 * HK) * D, HQ * D], dim=-1)
        heads = qkv.view(T, HQ + 2 * HK, D)
        qk = apply_rotary(rms_norm(heads[:, : HQ + HK], w.qk_norm, c.rms_norm_eps), rotary)
        kv_append(self.pages, torch.stack((qk[:, HQ:], heads[:, HQ + HK :]), dim=1), cells)
        return qk[:, :HQ], gate

    def _append_only(self, x: torch.Tensor, at: PrefillPass) -> None:
        """Keys and values of tokens whose output nobody reads."""
        c, w = self.config, self.weights
        T, D, HQ, HK = x.shape[0], c.head_dim, c.num_attention_heads, c.num_key_value_heads
        heads = linear(x, w.in_proj[HQ * D : (HQ + 2 * HK) * D], self.gemm).view(T, 2 * HK, D)
        cos, sin = at.rotary
        key = apply_rotary(rms_norm(heads[:, :HK], w.qk_norm[HQ:], c.rms_norm_eps), (cos[:T], sin[:T]))
        kv_append(self.pages, torch.stack((key, heads[:, HK:]), dim=1), at.cells[:T])

    def _project(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return linear(torch.sigmoid(gate).mul_(out.flatten(1)), self.weights.out_proj, self.gemm)


@attrs.frozen(eq=False)
class GatedDeltaNet:
    """Gated DeltaNet. conv: [slots, W - 1, C] and recurrent: FP32 [slots, HV, K, V] of this layer, all slots.

    qk_scale: FP32 [2 HK, 1], 1 / sqrt(K) for the q heads and 1 for the k heads.
    """

    weights: GdnWeights
    conv: torch.Tensor
    recurrent: torch.Tensor
    qk_scale: torch.Tensor
    config: Qwen35Config
    gemm: Gemm

    def prefill(self, x: torch.Tensor, at: PrefillPass, last_only: bool) -> torch.Tensor:
        """[T, H] -> [T, H], or [1, H] of the last token. Moves the slot's state T tokens on."""
        mixed, z, b, a = self._split(x)
        q, k, v = self._heads(causal_conv1d(mixed, self.conv[at.slot], self.weights.conv))
        g, beta = gates(b, a, self.weights.decay, self.weights.dt_bias)
        out = chunk_gated_delta_rule(q, k, v, g, beta, self.recurrent[at.slot], at.base % CHUNK)
        if last_only:
            out, z = out[-1:], z[-1:]
        return self._project(out, z)

    def decode(self, x: torch.Tensor, at: DecodePass) -> torch.Tensor:
        """[B, H] -> [B, H]. Moves each lane's slot one token on."""
        if at.slot is not None:  # one lane works on its slot itself, several on a copy
            conv, recurrent = self.conv[at.slot].unsqueeze(0), self.recurrent[at.slot].unsqueeze(0)
        else:
            conv, recurrent = self.conv.index_select(0, at.slots), self.recurrent.index_select(0, at.slots)
        mixed, z, b, a = self._split(x)
        q, k, v = self._heads(causal_conv1d_step(mixed, conv, self.weights.conv))
        g, beta = gates(b, a, self.weights.decay, self.weights.dt_bias)
        out = step_gated_delta_rule(q, k, v, g, beta, recurrent)
        if at.slot is None:
            self.conv.index_copy_(0, at.slots, conv)
            self.recurrent.index_copy_(0, at.slots, recurrent)
        return self._project(out, z)

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(q | k | v before the convolution [T, C], z [T, HV V], b [T, HV], a [T, HV])."""
        c = self.config
        HV = c.linear_num_value_heads
        sizes = [c.conv_channels, HV * c.linear_value_head_dim, HV, HV]
        return torch.split(linear(x, self.weights.in_proj, self.gemm), sizes, dim=-1)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(q, k) normed [T, HK, K], q scaled by 1 / sqrt(K); v [T, HV, V]; all FP32."""
        c = self.config
        HK, K, HV, V = (
            c.linear_num_key_heads,
            c.linear_key_head_dim,
            c.linear_num_value_heads,
            c.linear_value_head_dim,
        )
        qk, v = torch.split(mixed, [2 * HK * K, HV * V], dim=-1)
        q, k = torch.split(l2_norm(qk.reshape(-1, 2 * HK, K), self.qk_scale, _L2_EPS), HK, dim=1)
        return q, k, v.reshape(-1, HV, V)

    def _project(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        normed = gated_rms_norm(out, z.view(out.shape), self.weights.norm, self.config.rms_norm_eps)
        return linear(normed.flatten(1), self.weights.out_proj, self.gemm)


@attrs.frozen(eq=False)
class DenseBlock:
    """SwiGLU: [T, H] -> [T, H]."""

    weights: DenseWeights
    gemm: Gemm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Each row on its own."""
        return linear(swiglu(linear(x, self.weights.gate_up, self.gemm)), self.weights.down, self.gemm)


@attrs.frozen(eq=False)
class MoeBlock:
    """The best `top` experts of each token, and a shared one scaled by its own gate: [T, H] -> [T, H]."""

    weights: MoeWeights
    shared: DenseBlock
    top: int
    gemm: Gemm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Each row on its own."""
        w = self.weights
        logits = linear(x, w.router, self.gemm)
        experts, weights = route(logits[:, :-1], self.top)
        run = gathered_experts if x.shape[0] <= GATHERED_TOKENS else grouped_experts
        routed = run(x, experts, weights, w.gate_up, w.down)
        return routed.add_(self.shared(x).mul_(torch.sigmoid(logits[:, -1:])))


Mixer = Attention | GatedDeltaNet
Ffn = DenseBlock | MoeBlock


def ffn_block(weights: FfnWeights, top: int, gemm: Gemm) -> Ffn:
    """The block for these weights; `top` experts a token, of no use to a dense one."""
    if isinstance(weights, DenseWeights):
        return DenseBlock(weights, gemm)
    return MoeBlock(weights, DenseBlock(weights.shared, gemm), top, gemm)

"""Weights as the forward pass wants them: projections fused into one matrix each, norms as they multiply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs
import torch

from hpc_qwen35.config import LayerKind, MoeFfn, Qwen35Config
from hpc_qwen35.names import expected_tensors

__all__ = [
    "AttentionWeights",
    "DenseWeights",
    "FfnWeights",
    "GdnWeights",
    "LayerWeights",
    "MixerWeights",
    "MoeWeights",
    "Qwen35Weights",
    "fuse",
    "fuse_tensors",
]


@attrs.frozen(eq=False)
class AttentionWeights:
    """Gated attention.

    in_proj: [(2 HQ + 2 HK) D, H], rows q | k | v | gate: q and k lie together for their norm and rotation,
        k and v for a pass that needs only them.
    qk_norm: FP32 [HQ + HK, D], 1 + w of q_norm for each query head, then of k_norm for each key head.
    out_proj: [H, HQ D].
    """

    in_proj: torch.Tensor
    qk_norm: torch.Tensor
    out_proj: torch.Tensor


@attrs.frozen(eq=False)
class GdnWeights:
    """Gated DeltaNet.

    in_proj: [C + HV V + 2 HV, H], rows q | k | v | z | b | a, where q | k | v are the C conv channels.
    conv: FP32 [W, C], last row for the current column. decay: FP32 [HV], -exp(A_log). dt_bias: FP32 [HV].
    norm: FP32 [V], which multiplies by w itself. out_proj: [H, HV V].
    """

    in_proj: torch.Tensor
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out_proj: torch.Tensor


@attrs.frozen(eq=False)
class DenseWeights:
    """SwiGLU. gate_up: [2 I, H], gate rows first. down: [H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@attrs.frozen(eq=False)
class MoeWeights:
    """Experts.

    router: [E + 1, H], whose last row gates the shared expert. gate_up: [E, 2 I, H]. down: [E, H, I].
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: DenseWeights


MixerWeights: TypeAlias = AttentionWeights | GdnWeights
FfnWeights: TypeAlias = DenseWeights | MoeWeights


@attrs.frozen(eq=False)
class LayerWeights:
    """One layer. input_norm, post_norm: FP32 [H], 1 + w."""

    input_norm: torch.Tensor
    mixer: MixerWeights
    post_norm: torch.Tensor
    ffn: FfnWeights


@attrs.frozen(eq=False)
class Qwen35Weights:
    """A whole text model.

    embedding: [vocab, H]. norm: FP32 [H], 1 + w. head: [vocab, H], the embedding itself if tied.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where all of them lie."""
        return self.embedding.device


@attrs.frozen
class _Fuser:
    """Fuses tensors that `read` gives by name, on `device`; projections in `dtype`, the rest in FP32."""

    read: Callable[[str], torch.Tensor]
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""

    def matrix(self, name: str) -> torch.Tensor:
        """A copy, so that no view keeps a whole mapped file alive."""
        return self.read(self.prefix + name).to(device=self.device, dtype=self.dtype, copy=True).contiguous()

    def stacked(self, *names: str) -> torch.Tensor:
        return torch.cat([self.matrix(name) for name in names])

    def wide(self, name: str) -> torch.Tensor:
        return self.read(self.prefix + name).to(device=self.device, dtype=torch.float32, copy=True)

    def norm(self, name: str) -> torch.Tensor:
        """1 + w: what every norm but GDN's own multiplies by."""
        return self.wide(name).add_(1.0)

    def attention(self, c: Qwen35Config) -> AttentionWeights:
        # q_proj holds for each head its query rows and then its gate rows.
        paired = self.matrix("self_attn.q_proj.weight").view(c.num_attention_heads, 2, c.head_dim, -1)
        q, gate = (x.flatten(0, 1) for x in paired.unbind(1))
        k, v = self.matrix("self_attn.k_proj.weight"), self.matrix("self_attn.v_proj.weight")
        q_norm = self.norm("self_attn.q_norm.weight").expand(c.num_attention_heads, -1)
        k_norm = self.norm("self_attn.k_norm.weight").expand(c.num_key_value_heads, -1)
        return AttentionWeights(
            in_proj=torch.cat((q, k, v, gate)),
            qk_norm=torch.cat((q_norm, k_norm)),
            out_proj=self.matrix("self_attn.o_proj.weight"),
        )

    def gdn(self) -> GdnWeights:
        names = (f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
        return GdnWeights(
            in_proj=self.stacked(*names),
            conv=self.wide("linear_attn.conv1d.weight").squeeze(1).t().contiguous(),
            decay=self.wide("linear_attn.A_log").exp_().neg_(),
            dt_bias=self.wide("linear_attn.dt_bias"),
            norm=self.wide("linear_attn.norm.weight"),
            out_proj=self.matrix("linear_attn.out_proj.weight"),
        )

    def dense(self, name: str) -> DenseWeights:
        return DenseWeights(
            gate_up=self.stacked(f"{name}.gate_proj.weight", f"{name}.up_proj.weight"),
            down=self.matrix(f"{name}.down_proj.weight"),
        )

    def moe(self) -> MoeWeights:
        return MoeWeights(
            router=self.stacked("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
            gate_up=self.matrix("mlp.experts.gate_up_proj"),
            down=self.matrix("mlp.experts.down_proj"),
            shared=self.dense("mlp.shared_expert"),
        )

    def layer(self, c: Qwen35Config, number: int) -> LayerWeights:
        at = attrs.evolve(self, prefix=f"layers.{number}.")
        return LayerWeights(
            input_norm=at.norm("input_layernorm.weight"),
            mixer=at.gdn() if c.layers[number] is LayerKind.GDN else at.attention(c),
            post_norm=at.norm("post_attention_layernorm.weight"),
            ffn=at.moe() if isinstance(c.ffn, MoeFfn) else at.dense("mlp"),
        )


def fuse(
    config: Qwen35Config, read: Callable[[str], torch.Tensor], device: torch.device, dtype: torch.dtype
) -> Qwen35Weights:
    """Weights from tensors of `expected_tensors(config)`, each read once, in order. Copies them."""
    at = _Fuser(read, device, dtype)
    embedding = at.matrix("embed_tokens.weight")
    layers = tuple(at.layer(config, number) for number in range(len(config.layers)))
    norm = at.norm("norm.weight")
    head = embedding if config.tie_word_embeddings else at.matrix("lm_head.weight")
    return Qwen35Weights(embedding, layers, norm, head)


def fuse_tensors(
    config: Qwen35Config, tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> Qwen35Weights:
    """Weights from tensors in memory, under the names that `initialise` gives.

    Raises:
        KeyError: a tensor is missing. ValueError: one has another shape; the text names it.
    """
    for name, shape in expected_tensors(config).items():
        found = tuple(tensors[_full(name)].shape)
        if found != shape:
            raise ValueError(f"tensor {_full(name)!r} is {list(found)}: must be {list(shape)}")
    return fuse(config, lambda name: tensors[_full(name)], device, dtype)


def _full(name: str) -> str:
    return name if name == "lm_head.weight" else f"model.{name}"

"""Names and shapes of a checkpoint's tensors, without the prefix that a file may put before them."""

from __future__ import annotations

from hpc_qwen35.config import DenseFfn, LayerKind, Qwen35Config

__all__ = ["expected_tensors", "layer_tensors"]

Shape = tuple[int, ...]


def _attention(c: Qwen35Config) -> dict[str, Shape]:
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {
        "self_attn.q_proj.weight": (2 * q, c.hidden_size),  # a head's query rows, then its gate rows
        "self_attn.k_proj.weight": (kv, c.hidden_size),
        "self_attn.v_proj.weight": (kv, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, q),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
    }


def _gdn(c: Qwen35Config) -> dict[str, Shape]:
    heads = c.linear_num_value_heads
    values = heads * c.linear_value_head_dim
    return {
        "linear_attn.in_proj_qkv.weight": (c.conv_channels, c.hidden_size),
        "linear_attn.in_proj_z.weight": (values, c.hidden_size),
        "linear_attn.in_proj_b.weight": (heads, c.hidden_size),
        "linear_attn.in_proj_a.weight": (heads, c.hidden_size),
        "linear_attn.conv1d.weight": (c.conv_channels, 1, c.conv_width),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (c.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (c.hidden_size, values),
    }


def _swiglu(name: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def _ffn(c: Qwen35Config) -> dict[str, Shape]:
    H = c.hidden_size
    if isinstance(c.ffn, DenseFfn):
        return _swiglu("mlp", H, c.ffn.intermediate_size)
    E, inner = c.ffn.num_experts, c.ffn.intermediate_size
    return {
        "mlp.gate.weight": (E, H),
        "mlp.experts.gate_up_proj": (E, 2 * inner, H),
        "mlp.experts.down_proj": (E, H, inner),
        **_swiglu("mlp.shared_expert", H, c.ffn.shared_intermediate_size),
        "mlp.shared_expert_gate.weight": (1, H),
    }


def layer_tensors(config: Qwen35Config, layer: int) -> dict[str, Shape]:
    """Shape by name of one layer's tensors, `layers.N.` left out. Experts are stacked."""
    mixer = _gdn(config) if config.layers[layer] is LayerKind.GDN else _attention(config)
    norms = {
        f"{name}.weight": (config.hidden_size,) for name in ("input_layernorm", "post_attention_layernorm")
    }
    return {**norms, **mixer, **_ffn(config)}


def expected_tensors(config: Qwen35Config) -> dict[str, Shape]:
    """Shape by name of every tensor of a model. `lm_head.weight` only if it is not the embedding itself."""
    table = (config.vocab_size, config.hidden_size)
    tensors: dict[str, Shape] = {"embed_tokens.weight": table}
    for layer in range(len(config.layers)):
        for name, shape in layer_tensors(config, layer).items():
            tensors[f"layers.{layer}.{name}"] = shape
    tensors["norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = table
    return tensors

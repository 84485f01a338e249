"""The weights that a model has: their Hugging Face names and shapes, stated once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from minivllm.config import ModelConfig, ModelError


def check_weight(name: str, tensor: Tensor | None, shapes: Mapping[str, tuple[int, ...]], where: str = "") -> Tensor:
    """`tensor` itself. Raises `ModelError`, which begins with `where`, if it is missing (None) or has another shape than
    `shapes` says."""
    if tensor is None:
        raise ModelError(f"{where}weight {name} is missing; the download is incomplete, fetch it again")
    if tensor.shape != shapes[name]:
        raise ModelError(
            f"{where}weight {name} has shape {tuple(tensor.shape)}, its configuration says {shapes[name]}; "
            f"configuration and weights are of different models, fetch both again"
        )
    return tensor


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of a model, by Hugging Face name. A linear layer's weight is [out, in]."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for name, shape in layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's weights, by their Hugging Face name within the layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes

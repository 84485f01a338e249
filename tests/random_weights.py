"""Random weights for tiny models."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.config import ModelConfig


def random_weights(
    config: ModelConfig, *, std: float = 0.2, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Tensor]:
    """Weights of a config's shapes by their Hugging Face names; norms near one, all else normal with `std`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return (mean + std * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    hidden, inner, vocab, dim = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    weights = {"model.embed_tokens.weight": draw(vocab, hidden), "model.norm.weight": draw(hidden, mean=1.0)}
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = draw(vocab, hidden)
    for i in range(config.num_layers):
        p = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{p}{name}.weight"] = draw(hidden, mean=1.0)
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
            weights[f"{p}self_attn.{name}_proj.weight"] = draw(heads * dim, hidden)
            if config.qkv_bias:
                weights[f"{p}self_attn.{name}_proj.bias"] = draw(heads * dim)
            if config.qk_norm and name != "v":
                weights[f"{p}self_attn.{name}_norm.weight"] = draw(dim, mean=1.0)
        weights[f"{p}self_attn.o_proj.weight"] = draw(hidden, config.num_heads * dim)
        weights[f"{p}mlp.gate_proj.weight"] = draw(inner, hidden)
        weights[f"{p}mlp.up_proj.weight"] = draw(inner, hidden)
        weights[f"{p}mlp.down_proj.weight"] = draw(hidden, inner)
    return weights

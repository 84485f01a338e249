"""A second decoder, written apart from the engine's: no cache, no batching, no fused weights. Slow and plain."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minivllm.config import ModelConfig


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def frequency(config: ModelConfig, pair: int) -> float:
    f = 1.0 / config.rope_theta ** (2 * pair / config.head_dim)
    s = config.rope_scaling
    if s is None:
        return f
    wavelength = 2 * math.pi / f
    if wavelength < s.original_max_position / s.high_freq_factor:
        return f
    if wavelength > s.original_max_position / s.low_freq_factor:
        return f / s.factor
    smooth = (s.original_max_position / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - smooth) * f / s.factor + smooth * f


def turn(config: ModelConfig, x: Tensor) -> Tensor:
    """Rotate x [T, D] by its position: element i with element i + D/2."""
    half = config.head_dim // 2
    out = torch.empty_like(x)
    for position in range(len(x)):
        for i in range(half):
            angle = position * frequency(config, i)
            c, s = math.cos(angle), math.sin(angle)
            out[position, i] = x[position, i] * c - x[position, i + half] * s
            out[position, i + half] = x[position, i + half] * c + x[position, i] * s
    return out


def attention(config: ModelConfig, w: dict[str, Tensor], prefix: str, x: Tensor, window: int | None = None) -> Tensor:
    def project(name: str) -> Tensor:
        y = x @ w[f"{prefix}{name}_proj.weight"].T
        return y + w[f"{prefix}{name}_proj.bias"] if config.qkv_bias else y

    def heads(name: str, count: int) -> list[Tensor]:
        parts = list(project(name).split(config.head_dim, -1))
        assert len(parts) == count
        if name in "qk" and config.qk_norm:
            parts = [norm(part, w[f"{prefix}{name}_norm.weight"], config.rms_norm_eps) for part in parts]
        return [turn(config, part) for part in parts] if name in "qk" else parts

    q, k, v = heads("q", config.num_heads), heads("k", config.num_kv_heads), heads("v", config.num_kv_heads)
    position = torch.arange(len(x))
    distance = position[:, None] - position
    hidden = (distance < 0) | (distance >= (window or len(x)))
    out = []
    for head in range(config.num_heads):
        shared = head * config.num_kv_heads // config.num_heads
        scores = (q[head] @ k[shared].T / math.sqrt(config.head_dim)).masked_fill(hidden, -math.inf)
        out.append(scores.softmax(-1) @ v[shared])
    return torch.cat(out, -1) @ w[f"{prefix}o_proj.weight"].T


def reference_logits(config: ModelConfig, weights: dict[str, Tensor], token_ids: list[int]) -> Tensor:
    """Logits [T, V] of every position of one sequence, in the weights' dtype."""
    w, eps = weights, config.rms_norm_eps
    x = w["model.embed_tokens.weight"][token_ids]
    for i in range(config.num_layers):
        p = f"model.layers.{i}."
        x = x + attention(config, w, p + "self_attn.", norm(x, w[p + "input_layernorm.weight"], eps), config.windows[i])
        y = norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = y @ w[p + "mlp.gate_proj.weight"].T, y @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[p + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return norm(x, w["model.norm.weight"], eps) @ head.T

"""The transformer: one decoder for the Llama, Qwen2 and Qwen3 families."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.models.layers import PackedLinear, Rotary, gated_silu, rms_norm, rotate
from minivllm.models.weights import check_weight, weight_shapes

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attention(layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H, D]`: stores K and V, then attends."""


class Weights:
    """Looks up tensors by their Hugging Face names; checks shapes; converts to one dtype and device."""

    def __init__(
        self, config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shapes = weight_shapes(config)
        self._tensors, self._dtype, self._device = tensors, dtype, device

    def get(self, name: str) -> Tensor:
        """The tensor `name`. Raises `ModelError` if it's missing or has another shape."""
        return check_weight(name, self._tensors.get(name), self._shapes).to(self._device, self._dtype)


class DecoderLayer:
    """Attention and feed-forward network, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        self.config = config
        self.index = index
        self._prefix = f"model.layers.{index}."
        self.input_norm = weights.get(self._prefix + "input_layernorm.weight")
        self.post_attention_norm = weights.get(self._prefix + "post_attention_layernorm.weight")
        self.qkv = self._load_qkv(weights)
        self.qk_norm = self._load_qk_norm(weights) if config.qk_norm else None
        self.output = PackedLinear(weights.get(self._prefix + "self_attn.o_proj.weight"))
        self.gate_up = PackedLinear(self._load_joined(weights, "mlp.gate_proj.weight", "mlp.up_proj.weight"))
        self.down = PackedLinear(weights.get(self._prefix + "mlp.down_proj.weight"))

    def _load_joined(self, weights: Weights, *names: str) -> Tensor:
        """Several linear layers over the same input as one: one read of the input, one call."""
        return torch.cat([weights.get(self._prefix + name) for name in names])

    def _load_qkv(self, weights: Weights) -> PackedLinear:
        weight, bias = ([f"self_attn.{name}_proj.{kind}" for name in "qkv"] for kind in ("weight", "bias"))
        packed_bias = self._load_joined(weights, *bias) if self.config.qkv_bias else None
        return PackedLinear(self._load_joined(weights, *weight), packed_bias)

    def _load_qk_norm(self, weights: Weights) -> Tensor:
        """Norm weights of all query heads, then all key heads: [H + Hkv, D], so that one norm serves both."""
        query = weights.get(self._prefix + "self_attn.q_norm.weight").expand(self.config.num_heads, -1)
        key = weights.get(self._prefix + "self_attn.k_norm.weight").expand(self.config.num_kv_heads, -1)
        return torch.cat((query, key))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """Residual stream [T, hidden_size] -> the same tensor, one layer on."""
        hidden.add_(self.output(self._attend(hidden, cos, sin, attention)))
        normed = rms_norm(hidden, self.post_attention_norm, self.config.rms_norm_eps)
        return hidden.add_(self.down(gated_silu(self.gate_up(normed))))

    def _attend(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        config = self.config
        normed = rms_norm(hidden, self.input_norm, config.rms_norm_eps)
        qkv = self.qkv(normed).view(len(hidden), -1, config.head_dim)
        qk, v = qkv.split((config.num_heads + config.num_kv_heads, config.num_kv_heads), 1)
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, config.rms_norm_eps)
        q, k = rotate(qk, cos, sin).split((config.num_heads, config.num_kv_heads), 1)
        return attention(self.index, q, k, v).view(len(hidden), -1)


class Decoder:
    """A decoder-only transformer on flat tokens: it knows neither requests nor blocks.

    Where a token's past lives is the business of the `attention` it's called with.
    """

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], *, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> None:
        """Take weights by their Hugging Face names. `lm_head.weight` is absent where the embedding is its own head.

        Raises `ModelError` naming a weight that's missing or has a wrong shape.
        """
        self.config = config
        self.dtype = dtype
        self.device = resolve_device(device)
        source = Weights(config, weights, dtype, self.device)
        self.embedding = source.get("model.embed_tokens.weight")
        self.layers = [DecoderLayer(config, source, index) for index in range(config.num_layers)]
        self.norm = source.get("model.norm.weight")
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        self.head = PackedLinear(self.embedding if tied else source.get("lm_head.weight"))
        self.rotary = Rotary(config, dtype, self.device)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Residual stream [T, hidden_size] after the last layer, for token ids and positions int64 [T]."""
        cos, sin = self.rotary.at(positions)
        hidden = F.embedding(token_ids, self.embedding)
        for layer in self.layers:
            hidden = layer.forward(hidden, cos, sin, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of each token of the vocabulary to come next: rows of `forward` [R, hidden_size] -> [R, vocab_size].

        float32, or float64 in a float64 model. Ask for the rows that are sampled, not for all: the head is as large as
        several layers.
        """
        normed = rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return self.head(normed).to(torch.promote_types(self.dtype, torch.float32))


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto` means a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)

"""The transformer: one decoder for the Llama, Qwen2 and Qwen3 families."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import ConfigError, ModelConfig
from minivllm.models import layers
from minivllm.models.layers import LayerOps, PackedLinear, Rotary, rms_norm
from minivllm.models.weights import check_weight, weight_shapes

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attention(layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H, D]`: stores K and V, then attends."""

GetWeight = Callable[[str], Tensor]
"""The weight of a name, checked, in the dtype and on the device where it is used."""

MakeLinear = Callable[[Tensor], PackedLinear]
"""Makes a linear layer of its weight."""


class DecoderLayer:
    """Attention and feed-forward network, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, weight_of_model: GetWeight, row_linear: MakeLinear) -> None:
        def weight(name: str) -> Tensor:
            return weight_of_model(f"model.layers.{index}.{name}")

        self.config = config
        self.index = index
        self.input_norm = weight("input_layernorm.weight")
        self.post_attention_norm = weight("post_attention_layernorm.weight")
        self.qkv = _joined(weight, [f"self_attn.{name}_proj" for name in "qkv"], bias=config.qkv_bias)
        self.qk_norm = _joined_norm(config, weight) if config.qk_norm else None
        self.output = row_linear(weight("self_attn.o_proj.weight"))
        self.gate_up = _joined(weight, ["mlp.gate_proj", "mlp.up_proj"], bias=False)
        self.down = row_linear(weight("mlp.down_proj.weight"))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention, ops: LayerOps) -> Tensor:
        """Residual stream [T, hidden_size] -> the same tensor, one layer on."""
        update = self.output(self._attend(hidden, cos, sin, attention, ops))
        normed = ops.add_rms_norm(hidden, update, self.post_attention_norm, self.config.rms_norm_eps)
        return hidden.add_(self.down(ops.gated_silu(self.gate_up(normed))))

    def _attend(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention, ops: LayerOps) -> Tensor:
        config = self.config
        normed = ops.rms_norm(hidden, self.input_norm, config.rms_norm_eps)
        qkv = self.qkv(normed).view(len(hidden), -1, config.head_dim)
        qk, v = qkv.split((config.num_heads + config.num_kv_heads, config.num_kv_heads), 1)
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, config.rms_norm_eps)
        q, k = ops.rotate(qk, cos, sin).split((config.num_heads, config.num_kv_heads), 1)
        return attention(self.index, q, k, v).view(len(hidden), -1)


def _joined(weight: GetWeight, names: list[str], *, bias: bool) -> PackedLinear:
    """Several linear layers over the same input as one: one read of the input, one call."""
    matrix = torch.cat([weight(f"{name}.weight") for name in names])
    return PackedLinear(matrix, torch.cat([weight(f"{name}.bias") for name in names]) if bias else None)


def _joined_norm(config: ModelConfig, weight: GetWeight) -> Tensor:
    """Norm weights of all query heads, then all key heads: [H + Hkv, D], so that one norm serves both."""
    query = weight("self_attn.q_norm.weight").expand(config.num_heads, -1)
    key = weight("self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
    return torch.cat((query, key))


class Decoder:
    """A decoder-only transformer on flat tokens: it knows neither requests nor blocks.

    Where a token's past lives is the business of the `attention` it's called with.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        *,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        row_linear: MakeLinear = PackedLinear,
    ) -> None:
        """Take weights by their Hugging Face names. `lm_head.weight` is absent where the embedding is its own head.

        `row_linear` makes the two layers that end a block, output and down: where `config` and `weights` are a shard of a
        model (`models/shards.py`), these sum over all shards.
        Raises `ModelError` naming a weight that's missing or has a wrong shape.
        """
        self.config = config
        self.dtype = dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.device = resolve_device(device)
        shapes = weight_shapes(config)

        def weight(name: str) -> Tensor:
            return check_weight(name, weights.get(name), shapes).to(self.device, dtype)

        self.embedding = weight("model.embed_tokens.weight")
        self.layers = [DecoderLayer(config, index, weight, row_linear) for index in range(config.num_layers)]
        self.norm = weight("model.norm.weight")
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        self.head = PackedLinear(self.embedding if tied else weight("lm_head.weight"))
        self.rotary = Rotary(config, dtype, self.device)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, ops: LayerOps = layers) -> Tensor:
        """Residual stream [T, hidden_size] after the last layer, for token ids and positions int64 [T].

        float32, or float64 in a float64 model: a bfloat16 stream would round away small updates, layer by layer.
        """
        cos, sin = self.rotary.at(positions)
        hidden = F.embedding(token_ids, self.embedding).to(self.wide)
        for layer in self.layers:
            hidden = layer.forward(hidden, cos, sin, attention, ops)
        return hidden

    def logits(self, hidden: Tensor, ops: LayerOps = layers) -> Tensor:
        """Scores of each token of the vocabulary to come next: rows of `forward` [R, hidden_size] -> [R, vocab_size].

        float32, or float64 in a float64 model. Ask for the rows that are sampled, not for all: the head is as large as
        several layers.
        """
        normed = ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return self.head(normed).to(self.wide)


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto` means a GPU if there is one. Raises `ConfigError` for a GPU where there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", str(device), "torch finds no GPU: set it to cpu, or auto")
    return torch.device(device)

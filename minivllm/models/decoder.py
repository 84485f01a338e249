"""The transformer: one decoder for the Llama, Qwen2 and Qwen3 families."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import ModelConfig, ModelError
from minivllm.models import layers
from minivllm.models.layers import LayerOps, PackedLinear, Rotary, rms_norm

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attention(layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H, D]`: stores K and V, then attends."""


class Weights:
    """Looks up tensors by their Hugging Face names; checks shapes; converts to one dtype and device."""

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device

    def get(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`. Raises `ModelError` if it's missing or has another shape."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"weight {name} is missing; the file is incomplete or of another architecture")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"weight {name} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor.to(self._device, self._dtype)


class DecoderLayer:
    """Attention and feed-forward network, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        self.config = config
        self.index = index
        self._prefix = f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        self.input_norm = weights.get(self._prefix + "input_layernorm.weight", hidden)
        self.post_attention_norm = weights.get(self._prefix + "post_attention_layernorm.weight", hidden)
        self.qkv = self._load_qkv(weights)
        self.qk_norm = self._load_qk_norm(weights) if config.qk_norm else None
        self.output = PackedLinear(weights.get(self._prefix + "self_attn.o_proj.weight", hidden, heads))
        gate_up = [weights.get(f"{self._prefix}mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
        self.gate_up = PackedLinear(torch.cat(gate_up))
        self.down = PackedLinear(weights.get(self._prefix + "mlp.down_proj.weight", hidden, inner))

    def _load_qkv(self, weights: Weights) -> PackedLinear:
        """Query, key and value projections as one linear layer: one read of the input, one call."""
        config, prefix = self.config, self._prefix + "self_attn."
        rows = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        sizes = {name: heads * config.head_dim for name, heads in rows.items()}
        weight = [weights.get(f"{prefix}{name}_proj.weight", size, config.hidden_size) for name, size in sizes.items()]
        if not config.qkv_bias:
            return PackedLinear(torch.cat(weight))
        bias = [weights.get(f"{prefix}{name}_proj.bias", size) for name, size in sizes.items()]
        return PackedLinear(torch.cat(weight), torch.cat(bias))

    def _load_qk_norm(self, weights: Weights) -> Tensor:
        """Norm weights of all query heads, then all key heads: [H + Hkv, D], so that one norm serves both."""
        config, prefix = self.config, self._prefix + "self_attn."
        query = weights.get(prefix + "q_norm.weight", config.head_dim).expand(config.num_heads, -1)
        key = weights.get(prefix + "k_norm.weight", config.head_dim).expand(config.num_kv_heads, -1)
        return torch.cat((query, key))

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
        self.wide = torch.promote_types(dtype, torch.float32)
        self.device = resolve_device(device)
        source = Weights(weights, dtype, self.device)
        table = (config.vocab_size, config.hidden_size)
        self.embedding = source.get("model.embed_tokens.weight", *table)
        self.layers = [DecoderLayer(config, source, index) for index in range(config.num_layers)]
        self.norm = source.get("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        self.head = PackedLinear(self.embedding if tied else source.get("lm_head.weight", *table))
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

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of each token of the vocabulary to come next: rows of `forward` [R, hidden_size] -> [R, vocab_size].

        float32, or float64 in a float64 model. Ask for the rows that are sampled, not for all: the head is as large as
        several layers.
        """
        normed = rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return self.head(normed).to(self.wide)


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto` means a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)

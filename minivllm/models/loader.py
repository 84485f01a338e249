"""Reads a model from disk: a GGUF file or a folder of safetensors, both to the same names, layout and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from minivllm.config import ConfigError, ModelConfig, ModelError
from minivllm.models.gguf_model import GGUFCheckpoint
from minivllm.models.gguf_reader import read_gguf
from minivllm.models.safetensors_model import SafetensorsCheckpoint
from minivllm.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that is read from disk. `weights` by Hugging Face name, row-major, in one dtype, on the CPU."""

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer


class Checkpoint(Protocol):
    """A model on disk, whatever its format. Names and layout of tensors are those of Hugging Face."""

    path: Path

    def config(self) -> ModelConfig: ...

    def tokenizer(self) -> Tokenizer: ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The tensor called `name`, or None if there is none."""


def load_model(path: Path, dtype: torch.dtype) -> LoadedModel:
    """Read configuration, weights (converted to `dtype`) and tokenizer of the GGUF file or safetensors folder at `path`.

    Raises `ModelError`, naming the file and what to do, if anything is missing, damaged or not supported.
    """
    checkpoint = open_checkpoint(path)
    config = load_config(checkpoint)
    return LoadedModel(config, load_weights(checkpoint, config, dtype), checkpoint.tokenizer())


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a safetensors folder, reading no weights. Raises `ModelError` if `path` is neither."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    return GGUFCheckpoint(read_gguf(path))


def load_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model's shape. Raises `ModelError` if the file describes a model that can't exist or can't be run."""
    try:
        return checkpoint.config()
    except (ConfigError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"{checkpoint.path}: its configuration is not usable ({error}); fetch the model again"
        ) from error


def load_weights(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read every weight that a model of this configuration has. Raises `ModelError` if one is missing or misshapen."""
    weights = {}
    for name, shape in weight_shapes(config).items():
        tensor = checkpoint.read(name, dtype)
        if tensor is None:
            raise ModelError(f"{checkpoint.path}: weight {name} is missing; the download is incomplete, fetch it again")
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{checkpoint.path}: weight {name} has shape {tuple(tensor.shape)}, its configuration says {shape}; "
                f"configuration and weights are of different models, fetch both again"
            )
        weights[name] = tensor
    return weights


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

"""Reads a model from disk: a GGUF file or a folder of safetensors, both to the same names, layout and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minivllm.config import ConfigError, ModelConfig, ModelError
from minivllm.models.gguf_model import GGUFCheckpoint
from minivllm.models.gguf_reader import read_gguf
from minivllm.models.safetensors_model import SafetensorsCheckpoint
from minivllm.models.shards import Shard, make_shard
from minivllm.models.tokenizer import Tokenizer
from minivllm.models.weights import check_weight, weight_shapes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that is read from disk. `weights` by Hugging Face name, row-major, in one dtype, on the CPU."""

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer


Checkpoint = GGUFCheckpoint | SafetensorsCheckpoint
"""A model on disk. Names and layout of its tensors are those of Hugging Face, whatever the format."""


def load_model(path: Path, dtype: torch.dtype, rank: int = 0, size: int = 1) -> LoadedModel:
    """Read configuration, weights (converted to `dtype`) and tokenizer of the GGUF file or safetensors folder at `path`.

    With `size` > 1, configuration and weights are those of shard `rank` (`models/shards.py`).

    Raises `ModelError`, naming the file and what to do, if anything is missing, damaged or not supported; `ConfigError`
    if the model can't be split into `size` shards.
    """
    checkpoint = open_checkpoint(path)
    config = load_config(checkpoint)
    shard = make_shard(config, rank, size)
    return LoadedModel(shard.config, load_weights(checkpoint, config, dtype, shard), checkpoint.tokenizer())


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
        raise ModelError(f"{checkpoint.path}: its configuration is not usable ({error}); fetch it again") from error


def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, shard: Shard | None = None
) -> dict[str, Tensor]:
    """Read every weight that a model of this configuration has, and keep it, or the shard's part: then at no time is there
    more than one whole one in memory. Raises `ModelError` if one is missing or misshapen."""
    shapes, where = weight_shapes(config), f"{checkpoint.path}: "
    cut = (shard or make_shard(config, 0, 1)).cut
    return {name: cut(name, check_weight(name, checkpoint.read(name, dtype), shapes, where)) for name in shapes}

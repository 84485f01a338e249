"""A folder as Hugging Face publishes models: config.json, tokenizer.json and one or more safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minivllm.config import Architecture, LayerKind, ModelConfig, ModelError, RopeScaling
from minivllm.models.json_files import Json, read_json
from minivllm.models.tokenizer import Tokenizer
from minivllm.models.tokenizer_files import tokenizer_from_folder

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
LAYER_KINDS: Mapping[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}
DEFAULT_THETA = 10_000.0
# settings that change what the model computes, and the one value that the decoder computes
ONLY_VALUE: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


class SafetensorsCheckpoint:
    """A model folder. Weights stay on disk until they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = weight_files(path)

    def config(self) -> ModelConfig:
        """The model's shape, from config.json and generation_config.json."""
        where = self.path / "config.json"
        return config_from_json(read_json(where), read_json(self.path / "generation_config.json", optional=True), where)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of tokenizer.json; it ends answers where the configuration does."""
        return tokenizer_from_folder(self.path, self.config().eos_token_ids)

    def read(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The tensor called `name` in `dtype`, or None if there is none."""
        file = self.files.get(name)
        if file is None:
            return None
        with _opened(file) as tensors:
            return tensors.get_tensor(name).to(dtype)


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, from the index of a sharded model or the one file of a small one.

    Raises `ModelError` if there are no safetensors, or a file that the index names is missing or damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {name: folder / file for name, file in _get(read_json(index), "weight_map", index).items()}
        for file in sorted(set(files.values())):
            _names(file)
        return files
    single = folder / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{folder}: has no model.safetensors; give a folder with safetensors weights, or a .gguf file")
    return dict.fromkeys(_names(single), single)


def config_from_json(config: Json, generation: Json, where: Path) -> ModelConfig:
    """The model's shape from config.json; `generation` (generation_config.json) may add end-of-sequence ids.

    Raises `ModelError` naming `where` for another architecture, a missing key or a setting that is not supported.
    """
    architecture = next(iter(config.get("architectures") or ["(none)"]))
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{where}: architecture {architecture} is not supported; use one of {', '.join(ARCHITECTURES)}"
        )
    for key, only in ONLY_VALUE.items():
        if config.get(key, only) not in (only, None):
            raise ModelError(f"{where}: {key}={config[key]!r} is not supported; use a model with {key}={only!r}")
    num_heads, hidden_size = _get(config, "num_attention_heads", where), _get(config, "hidden_size", where)
    rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    window, kinds = _windows(config, where)
    return ModelConfig(
        architecture=cast(Architecture, ARCHITECTURES[architecture]),
        vocab_size=_get(config, "vocab_size", where),
        hidden_size=hidden_size,
        intermediate_size=_get(config, "intermediate_size", where),
        num_layers=_get(config, "num_hidden_layers", where),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or DEFAULT_THETA),
        rope_scaling=_rope_scaling(rope, where),
        max_position=config.get("max_position_embeddings", 2048),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=eos_ids(config.get("eos_token_id"), generation.get("eos_token_id")),
        name=where.parent.name,
        sliding_window=window,
        layer_kinds=kinds,
    )


def eos_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """All end-of-sequence ids that the files give, each as a number, a list or nothing; without repeats."""
    listed = [source if isinstance(source, list) else [source] for source in sources]
    return tuple(dict.fromkeys(token for ids in listed for token in ids if token is not None))


def _windows(config: Json, where: Path) -> tuple[int | None, tuple[LayerKind, ...]]:
    """Window and kind of the layers, (None, ()) if none slides. `layer_types` says which do, or with `use_sliding_window`
    `max_window_layers`: how many full ones come first. A `sliding_window` alone means nothing, as in transformers."""
    kinds, switch = config.get("layer_types"), config.get("use_sliding_window")
    if kinds is None and switch:
        num_layers, num_full = _get(config, "num_hidden_layers", where), _get(config, "max_window_layers", where)
        kinds = ["sliding_attention" if layer >= num_full else "full_attention" for layer in range(num_layers)]
    if unknown := [kind for kind in kinds or () if kind not in LAYER_KINDS]:
        raise ModelError(
            f"{where}: layer type {unknown[0]} is not supported; use a model with {' or '.join(LAYER_KINDS)}"
        )
    if not kinds or "sliding_attention" not in kinds:
        return None, ()
    return None if switch is False else config.get("sliding_window"), tuple(LAYER_KINDS[kind] for kind in kinds)


def _names(file: Path) -> list[str]:
    with _opened(file) as tensors:
        return list(tensors.keys())


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    """A safetensors file to read from. Raises `ModelError` for whatever goes wrong meanwhile."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: can't be read ({error}); the download is incomplete, fetch it again") from error


def _get(content: Json, key: str, where: Path) -> Any:
    if content.get(key) is None:
        raise ModelError(f"{where}: {key} is missing; the file is incomplete, fetch it again")
    return content[key]


def _rope_scaling(rope: Json, where: Path) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{where}: rope scaling {kind} is not supported; use a model with none or llama3 scaling")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original_max_position = (_get(rope, key, where) for key in keys)
    return RopeScaling(float(factor), float(low), float(high), int(original_max_position))

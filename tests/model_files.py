"""Writes tiny models to disk, as GGUF (by the `gguf` package) and as safetensors folders."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import save_file

from minivllm.config import ModelConfig, RopeScaling
from minivllm.models.gguf_model import LAYER_NAMES, TOP_NAMES
from minivllm.models.tokenizer import byte_of_character

CONTROL = 3
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def tiny_config(architecture="llama", **changes) -> ModelConfig:
    sizes = dict(vocab_size=262, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
                 head_dim=16, tie_word_embeddings=True, bos_token_id=260, eos_token_ids=(261,), name="tiny")  # fmt: skip
    return ModelConfig(architecture=architecture, **{**sizes, **changes})


def interleaved_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """What a llama converter does to query and key rows: row i of a half and row i of the other become neighbours."""
    head_dim = len(weight) // heads
    order = [
        h * head_dim + half * head_dim // 2 + i for h in range(heads) for i in range(head_dim // 2) for half in (0, 1)
    ]
    return weight[order]


def write_gguf(path: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], *, kind="F32", omit=(), extra=None,
               pre="smollm", **settings) -> Path:  # fmt: skip
    """Write a GGUF; matrices in the quantisation `kind`, metadata keys in `omit` left out, `settings` added to the rest."""
    arch = config.architecture
    writer = gguf.GGUFWriter(path, arch)
    values = {
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.block_count": config.num_layers,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.context_length": config.max_position,
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0],
        **(extra or {}),
    }
    for key, value in values.items():
        if key not in omit:
            writer.add_uint32(key, value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_theta)
    writer.add_name(config.name)
    for key, value in settings.items():
        writer.add_string(key.replace("__", "."), value)
    write_vocabulary(writer, pre)
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleaved_rows(array, config.num_heads if "q_proj" in name else config.num_kv_heads)
        stored = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        writer.add_tensor(stored_name(name), quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor; other names as they are."""
    module, _, kind = name.rpartition(".")
    if module in TOP_NAMES:
        return f"{TOP_NAMES[module]}.{kind}"
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"
    return name


VOCABULARY = [
    *byte_of_character(),
    "he",
    "ll",
    "hell",
    "hello",
    "<|begin|>",
    "<|end|>",
]  # 256 bytes, 4 merges, 2 control
MERGES = ["h e", "l l", "he ll", "hell o"]


def write_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([1] * 260 + [CONTROL] * 2)
    writer.add_token_merges(MERGES)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_folder(folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], *, shards=1, **changes) -> Path:
    """Write a Hugging Face folder; `changes` go into config.json, those that are None take a key out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {k: v for k, v in {**hub_config(config), **changes}.items() if v is not None})
    write_tokenizer(folder)
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    return folder


def hub_config(config: ModelConfig) -> dict[str, object]:
    """config.json of a model."""
    return {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.architecture] + "ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
    }


def write_tokenizer(folder: Path) -> None:
    vocabulary = {piece: token for token, piece in enumerate(VOCABULARY)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    write_json(folder / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": vocabulary[name], "content": name, **flags} for name in VOCABULARY[260:]],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [m.split() for m in MERGES]},
    })  # fmt: skip
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE},
    )


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


LLAMA3_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)

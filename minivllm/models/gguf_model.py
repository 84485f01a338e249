"""A GGUF file as a checkpoint: its metadata as a `ModelConfig`, its tensors under Hugging Face names and layout."""

from __future__ import annotations

from dataclasses import replace
from typing import cast, get_args

import torch
from torch import Tensor

from minivllm.config import Architecture, ModelConfig, ModelError, RopeScaling
from minivllm.models.gguf_reader import GGUFFile
from minivllm.models.layers import rotary_frequencies
from minivllm.models.tokenizer import Tokenizer
from minivllm.models.tokenizer_files import tokenizer_from_gguf

TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# what every Llama 3.1 to 3.3 has; the file stores only the factors that follow from them
LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR, LLAMA3_ORIGINAL_MAX_POSITION = 1.0, 4.0, 8192


class GGUFCheckpoint:
    """A model in one GGUF file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.path = file, file.path

    def config(self) -> ModelConfig:
        """The model's shape, from the file's metadata."""
        return config_from_gguf(self.file)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the file's metadata describes."""
        return tokenizer_from_gguf(self.file, eos_from_gguf(self.file))

    def read(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The tensor with Hugging Face name `name` in `dtype`, dequantised, in Hugging Face layout; None if there is none."""
        stored = gguf_name(name)
        if stored not in self.file.tensors:
            return None
        tensor = self.file.read(stored, dtype)
        heads = _rotary_heads(self.file, name)
        return half_split_rows(tensor, heads) if heads else tensor


def gguf_name(name: str) -> str:
    """Hugging Face tensor name to GGUF: `model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    module, kind = name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{TOP_NAMES[module]}.{kind}"
    layer, part = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def half_split_rows(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows [heads * D, ..] of a query or key projection from interleaved to half-split rotary pairs.

    llama.cpp turns elements (2i, 2i + 1) of a head together, Hugging Face elements (i, i + D / 2); so the converter
    permutes the rows of llama-architecture models, and this undoes it. (llama.cpp, `convert_hf_to_gguf.py:permute`;
    Qwen's are stored as they are.)
    """
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _rotary_heads(file: GGUFFile, name: str) -> int:
    """How many heads of permuted rows the tensor has: 0 unless it is a query or key projection of a llama model."""
    if file.metadata.get("general.architecture") != "llama":
        return 0
    num_heads = file.integer("llama.attention.head_count")
    if name.endswith("q_proj.weight"):
        return num_heads
    return file.integer("llama.attention.head_count_kv", num_heads) if name.endswith("k_proj.weight") else 0


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The model's shape from metadata. Raises `ModelError` for another architecture or a variant that is not supported."""
    kind = file.text("general.architecture")
    if kind not in get_args(Architecture):
        raise ModelError(f"{file.path}: architecture {kind} is not supported; use a llama, qwen2 or qwen3 model")
    if file.integer(f"{kind}.expert_count", 0):
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported; use a dense one")
    if file.integer(f"{kind}.attention.sliding_window", 0):
        raise ModelError(f"{file.path}: sliding windows are read from safetensors folders only; use one of those")
    num_heads = file.integer(f"{kind}.attention.head_count")
    hidden_size = file.integer(f"{kind}.embedding_length")
    head_dim = file.integer(f"{kind}.attention.key_length", hidden_size // max(num_heads, 1))
    bos = file.integer("tokenizer.ggml.bos_token_id", -1)
    config = ModelConfig(
        architecture=cast(Architecture, kind),
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=file.integer(f"{kind}.feed_forward_length"),
        num_layers=file.integer(f"{kind}.block_count"),
        num_heads=num_heads,
        num_kv_heads=file.integer(f"{kind}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=file.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        rope_theta=file.number(f"{kind}.rope.freq_base", 10_000.0),
        max_position=file.integer(f"{kind}.context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=None if bos < 0 else bos,
        eos_token_ids=eos_from_gguf(file),
        name=file.text("general.name", file.path.stem),
    )
    return replace(config, rope_scaling=_rope_scaling(file, config))


def eos_from_gguf(file: GGUFFile) -> tuple[int, ...]:
    """Ids that end an answer: end of sequence, and end of turn or message where the file names one."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.integer(f"tokenizer.ggml.{key}") for key in keys if f"tokenizer.ggml.{key}" in file.metadata]
    return tuple(dict.fromkeys(ids))


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: some models pad it beyond the tokenizer's vocabulary."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing; the file is incomplete, fetch it again")
    return embedding.shape[0]


def _rope_scaling(file: GGUFFile, config: ModelConfig) -> RopeScaling | None:
    kind = config.architecture
    scaling = file.text(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(
            f"{file.path}: rope scaling {scaling} is not supported; use a model with none or llama3 scaling"
        )
    rotated = file.integer(f"{kind}.rope.dimension_count", config.head_dim)
    if rotated != config.head_dim:
        raise ModelError(
            f"{file.path}: rotates {rotated} of {config.head_dim} head elements; only whole heads are supported"
        )
    return llama3_scaling(file, config) if "rope_freqs.weight" in file.tensors else None


def llama3_scaling(file: GGUFFile, config: ModelConfig) -> RopeScaling:
    """Recover Llama 3's scaling from the divisors [head_dim / 2] that a GGUF stores; the largest is `factor` itself.

    Raises `ModelError` if the recovered scaling doesn't give those divisors back: they are then of another method.
    """
    divisors = file.read("rope_freqs.weight")
    scaling = RopeScaling(
        float(divisors.max()), LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR, LLAMA3_ORIGINAL_MAX_POSITION
    )
    plain, scaled = rotary_frequencies(config), rotary_frequencies(replace(config, rope_scaling=scaling))
    if divisors.shape != plain.shape or not torch.allclose(divisors.double(), plain / scaled, rtol=1e-4):
        raise ModelError(
            f"{file.path}: rope_freqs.weight is no llama3 scaling; use a Llama 3.1 to 3.3 model or one without"
        )
    return scaling

"""What a model is and how the engine runs it. Bad values raise `ConfigError` naming field, value and fix."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal


class MinivllmError(Exception):
    """Base of every error a user can cause; the command line prints it as one line."""


class ConfigError(MinivllmError, ValueError):
    """A setting has a value the engine can't run with."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field}={value!r}: {fix}")
        self.field, self.value, self.fix = field, value, fix


class RequestError(ConfigError):
    """One request is bad; everything else that runs goes on."""


class ModelError(MinivllmError):
    """A model can't be found, fetched, read or run. The message says what to do."""


def at_least(field: str, value: float, low: float, error: type[ConfigError] = ConfigError) -> None:
    """Raise `error` unless `value >= low`."""
    if not value >= low:
        raise error(field, value, f"must be at least {low}")


def one_of(field: str, value: object, allowed: tuple[object, ...], error: type[ConfigError] = ConfigError) -> None:
    """Raise `error` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise error(field, value, f"must be one of {', '.join(map(str, allowed))}")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling of rotary embeddings (Llama 3.1, section "RoPE scaling" of its model card)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


LayerKind = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model of the Llama, Qwen2 or Qwen3 family. Lengths in tokens, sizes in elements.

    A token of a sliding layer attends to the last `sliding_window` tokens, itself among them. `layer_kinds` has one kind
    a layer; left out, all layers are of one: sliding if there is a window, else full.
    """

    architecture: Literal["llama", "qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_position: int = 2048
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    name: str = "model"

    def __post_init__(self) -> None:
        one_of("architecture", self.architecture, ("llama", "qwen2", "qwen3"))
        for field in fields(self):
            if field.type == "int":
                at_least(field.name, getattr(self, field.name), 1)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_kv_heads", self.num_kv_heads, f"must divide num_heads={self.num_heads}")
        if self.sliding_window is not None:
            at_least("sliding_window", self.sliding_window, 1)
        elif "sliding" in self.layer_kinds:
            raise ConfigError("sliding_window", None, "sliding layers need a window")
        if len(self.layer_kinds) not in (0, self.num_layers):
            raise ConfigError("layer_kinds", self.layer_kinds, f"must name num_layers={self.num_layers} kinds, or none")

    @property
    def qkv_bias(self) -> bool:
        """Qwen2 adds a bias to the query, key and value projections."""
        return self.architecture == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each query and key head before the rotary embedding."""
        return self.architecture == "qwen3"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window in tokens; None where a token attends to everything before it."""
        kinds = self.layer_kinds or ("sliding",) * self.num_layers
        return tuple(self.sliding_window if kind == "sliding" else None for kind in kinds)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V that one token takes in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


Policy = Literal["fcfs", "priority", "static"]
FreeOrder = Literal["leaf_first", "root_first"]
PublishAt = Literal["schedule", "compute"]
SpecMethod = Literal["none", "ngram", "draft"]
Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs a model. Each default is what the leading engine does today, or what its reason asks for here.

    Memory: `num_kv_blocks` wins over `kv_cache_memory` (bytes), which wins over `memory_utilization`, which wins over
    `kv_memory_fraction` of free memory. `memory_utilization` is the share of the whole device that the engine may take,
    for weights and all: a profile run at start-up finds what it leaves for KV. `max_model_len="auto"`: the model's own
    length, or the largest that fits if that is less. With tensor parallelism (`tensor_parallel_size` processes share each
    layer: `runner/parallel.py`) each size is for one process.
    Switches to teach with: `policy`, `free_order`, `publish_at`, `reserve_full_prompt`, `long_prefill_threshold`,
    `enable_prefix_caching`, `enable_chunked_prefill`, `lifo_unhashed`, `partial_block_hits` (off: hits are whole blocks),
    `async_depth` (steps planned ahead of the one that runs: 0 or 1. A device of its own gains from 1; on a CPU the
    scheduler would only compete with the model it hides behind, so 0, as in the leading engine's CPU back end),
    `hybrid` (off: layers with a window keep the KV of all tokens, as if they had none), `host_kv_blocks` (blocks of KV kept in
    host memory, `kv/offload.py`), `preemption` (swap: what a preempted request has computed is kept there).
    Speculation: `spec_method` proposes up to `spec_tokens` tokens a step to each sequence that decodes, from the text
    itself (`ngram`: what followed the last `spec_ngram_max` .. `spec_ngram_min` tokens before) or from `draft_model`, a
    smaller model with the same vocabulary. Beams run without.
    """

    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    memory_utilization: float | None = None
    kv_memory_fraction: float = 0.1
    max_model_len: int | Literal["auto"] = "auto"
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_threshold: int = 0
    reserve_full_prompt: bool = True
    watermark: float = 0.0
    policy: Policy = "fcfs"
    free_order: FreeOrder = "leaf_first"
    lifo_unhashed: bool = True
    publish_at: PublishAt = "schedule"
    partial_block_hits: bool = False
    async_depth: int = 0
    hybrid: Literal["on", "off"] = "on"
    spec_method: SpecMethod = "none"
    spec_tokens: int = 4
    spec_ngram_min: int = 2
    spec_ngram_max: int = 4
    draft_model: str | None = None
    host_kv_blocks: int = 0
    preemption: Preemption = "recompute"
    tensor_parallel_size: int = 1
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: Literal["auto", "cpp", "torch", "reference"] = "auto"
    seed: int = 0
    trace_file: str | None = None
    check_integrity: bool = False

    def __post_init__(self) -> None:
        for field in (
            "block_size",
            "max_num_batched_tokens",
            "max_num_seqs",
            "spec_tokens",
            "spec_ngram_min",
            "tensor_parallel_size",
        ):
            at_least(field, getattr(self, field), 1)
        for field in ("num_kv_blocks", "kv_cache_memory"):
            if getattr(self, field) is not None:
                at_least(field, getattr(self, field), 1)
        if self.max_model_len != "auto":
            at_least("max_model_len", self.max_model_len, 1)
        at_least("long_prefill_threshold", self.long_prefill_threshold, 0)
        if self.long_prefill_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                "long_prefill_threshold",
                self.long_prefill_threshold,
                "splits prompts: it needs enable_chunked_prefill, or must be 0",
            )
        if self.partial_block_hits and not self.enable_prefix_caching:
            raise ConfigError("partial_block_hits", True, "needs enable_prefix_caching, or must be False")
        at_least("host_kv_blocks", self.host_kv_blocks, 0)
        if self.host_kv_blocks and (self.partial_block_hits or not self.enable_prefix_caching):
            fix = "keeps whole blocks by their hashes: needs enable_prefix_caching=True and partial_block_hits=False"
            raise ConfigError("host_kv_blocks", self.host_kv_blocks, fix)
        if self.preemption == "swap" and not self.host_kv_blocks:
            raise ConfigError("preemption", "swap", "needs host memory: set host_kv_blocks")
        if not 0 <= self.watermark < 1:
            raise ConfigError("watermark", self.watermark, "must be in [0, 1), a share of the blocks")
        if not 0 < self.kv_memory_fraction < 1:
            raise ConfigError(
                "kv_memory_fraction", self.kv_memory_fraction, "must be in (0, 1), a share of free memory"
            )
        if self.memory_utilization is not None and not 0 < self.memory_utilization <= 1:
            raise ConfigError("memory_utilization", self.memory_utilization, "must be in (0, 1], a share of the device")
        self._check_speculation()
        one_of("async_depth", self.async_depth, (0, 1))
        one_of("policy", self.policy, ("fcfs", "priority", "static"))
        one_of("free_order", self.free_order, ("leaf_first", "root_first"))
        one_of("publish_at", self.publish_at, ("schedule", "compute"))
        one_of("hybrid", self.hybrid, ("on", "off"))
        one_of("preemption", self.preemption, ("recompute", "swap"))
        one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float64"))
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        one_of("attention_backend", self.attention_backend, ("auto", "cpp", "torch", "reference"))

    def _check_speculation(self) -> None:
        one_of("spec_method", self.spec_method, ("none", "ngram", "draft"))
        at_least("spec_ngram_max", self.spec_ngram_max, self.spec_ngram_min)
        if self.spec_method != "none" and self.async_depth:
            raise ConfigError(
                "async_depth",
                self.async_depth,
                f"spec_method={self.spec_method} proposes from known tokens: set it to 0",
            )
        if (self.spec_method == "draft") != (self.draft_model is not None):
            raise ConfigError("draft_model", self.draft_model, "goes with spec_method=draft: give both or neither")

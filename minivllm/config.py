"""What a model is and how the engine runs it. Bad values raise `ConfigError` naming field, value and fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


class MinivllmError(Exception):
    """Base of every error a user can cause; the command line prints it as one line."""


class ConfigError(MinivllmError, ValueError):
    """A setting has a value the engine can't run with."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field}={value!r:.200}: {fix}")  # of a long value, its beginning
        self.field, self.value, self.fix = field, value, fix


class RequestError(ConfigError):
    """One request is bad; everything else that runs goes on."""


class ModelError(MinivllmError):
    """A model can't be found, fetched, read or run. The message says what to do."""


# rules for values


@dataclass(frozen=True, slots=True)
class Must:
    """What a value must do, in words that go on after "must", and as a test. A field's type can say it: `Annotated[int, Must(..)]`."""

    words: str
    test: Callable[[Any], bool]

    def check(self, field: str, value: object, error: type[ConfigError] = ConfigError) -> None:
        """Raise `error` unless `value` does it."""
        if not self.test(value):
            raise error(field, value, f"must {self.words}")


def at_least(low: float) -> Must:
    """A rule for numbers."""
    return Must(f"be at least {low}", lambda value: value >= low)


def one_of(allowed: Collection[object]) -> Must:
    """A rule for anything that is listed."""
    return Must(f"be one of {', '.join(map(str, allowed))}", lambda value: value in allowed)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


Number = Annotated[float, Must("be a finite number", _is_finite)]
Whole = Annotated[int, Must("be a whole number", lambda value: _is_finite(value) and value == int(value))]
Count = Annotated[Whole, at_least(1)]
CountOrZero = Annotated[Whole, at_least(0)]


def check_value(field: str, value: object, kind: Any, error: type[ConfigError] = ConfigError) -> None:
    """Raise `error` if a type refuses a value: by the rules in an `Annotated`, or because it is none of a `Literal`'s
    or not true or false.
    `.. | None` lets None pass; other types say nothing."""
    if NoneType in get_args(kind):
        if value is None:
            return
        kind = get_args(kind)[0]
    rules = getattr(kind, "__metadata__", ())
    if kind is bool or get_origin(kind) is Literal:
        rules = [one_of(get_args(kind) or (True, False))]
    for rule in rules:
        rule.check(field, value, error)


def check_fields(settings: object, error: type[ConfigError] = ConfigError) -> None:
    """`check_value` for all fields of a dataclass."""
    for field, kind in _types_of(type(settings)).items():
        check_value(field, getattr(settings, field), kind, error)


_types_of: Callable[[type], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))


# a model


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling of rotary embeddings (Llama 3.1, section "RoPE scaling" of its model card)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


Architecture = Literal["llama", "qwen2", "qwen3"]
LayerKind = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model of the Llama, Qwen2 or Qwen3 family. Lengths in tokens, sizes in elements.

    A token of a sliding layer attends to the last `sliding_window` tokens, itself among them. `layer_kinds` has one kind
    a layer; left out, all layers are of one: sliding if there is a window, else full.
    """

    architecture: Architecture
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_position: Count = 2048
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: Count | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    name: str = "model"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_kv_heads", self.num_kv_heads, f"must divide num_heads={self.num_heads}")
        if self.sliding_window is None and "sliding" in self.layer_kinds:
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


# the engine


Policy = Literal["fcfs", "priority", "static"]
FreeOrder = Literal["leaf_first", "root_first"]
PublishAt = Literal["schedule", "compute"]
SpecMethod = Literal["none", "ngram", "draft"]
Preemption = Literal["recompute", "swap"]
ShareOfBlocks = Annotated[Number, Must("be in [0, 1), a share of the blocks", lambda share: 0 <= share < 1)]
ShareOfFree = Annotated[Number, Must("be in (0, 1), a share of free memory", lambda share: 0 < share < 1)]
ShareOfDevice = Annotated[Number, Must("be in (0, 1], a share of the device", lambda share: 0 < share <= 1)]


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
    host memory, `kv/offload.py`), `preemption` (swap: what a preempted request has computed is kept there),
    `enforce_eager` (on: a GPU is told each kernel of a decode step, instead of replaying them as a CUDA graph).
    Speculation: `spec_method` proposes up to `spec_tokens` tokens a step to each sequence that decodes, from the text
    itself (`ngram`: what followed the last `spec_ngram_max` .. `spec_ngram_min` tokens before) or from `draft_model`, a
    smaller model with the same vocabulary. Beams run without.
    """

    block_size: Count = 16
    num_kv_blocks: Count | None = None
    kv_cache_memory: Count | None = None
    memory_utilization: ShareOfDevice | None = None
    kv_memory_fraction: ShareOfFree = 0.1
    max_model_len: int | Literal["auto"] = "auto"
    max_num_batched_tokens: Count = 2048
    max_num_seqs: Count = 128
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_threshold: CountOrZero = 0
    reserve_full_prompt: bool = True
    watermark: ShareOfBlocks = 0.0
    policy: Policy = "fcfs"
    free_order: FreeOrder = "leaf_first"
    lifo_unhashed: bool = True
    publish_at: PublishAt = "schedule"
    partial_block_hits: bool = False
    async_depth: Literal[0, 1] = 0
    hybrid: Literal["on", "off"] = "on"
    spec_method: SpecMethod = "none"
    spec_tokens: Count = 4
    spec_ngram_min: Count = 2
    spec_ngram_max: Count = 4
    draft_model: str | None = None
    host_kv_blocks: CountOrZero = 0
    preemption: Preemption = "recompute"
    tensor_parallel_size: Count = 1
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: Literal["auto", "triton", "cpp", "torch", "reference"] = "auto"
    enforce_eager: bool = False
    seed: int = 0
    trace_file: str | None = None
    check_integrity: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_model_len != "auto":
            check_value("max_model_len", self.max_model_len, Count)
        if self.long_prefill_threshold and not self.enable_chunked_prefill:
            raise self._refusal(
                "long_prefill_threshold", "splits prompts: it needs enable_chunked_prefill, or must be 0"
            )
        if self.partial_block_hits and not self.enable_prefix_caching:
            raise self._refusal("partial_block_hits", "needs enable_prefix_caching, or must be False")
        if self.host_kv_blocks and (self.partial_block_hits or not self.enable_prefix_caching):
            fix = "keeps whole blocks by their hashes: needs enable_prefix_caching=True and partial_block_hits=False"
            raise self._refusal("host_kv_blocks", fix)
        if self.preemption == "swap" and not self.host_kv_blocks:
            raise self._refusal("preemption", "needs host memory: set host_kv_blocks")
        self._check_speculation()

    def _check_speculation(self) -> None:
        at_least(self.spec_ngram_min).check("spec_ngram_max", self.spec_ngram_max)
        if self.spec_method != "none" and self.async_depth:
            raise self._refusal(
                "async_depth", f"spec_method={self.spec_method} proposes from known tokens: set it to 0"
            )
        if (self.spec_method == "draft") != (self.draft_model is not None):
            raise self._refusal("draft_model", "goes with spec_method=draft: give both or neither")

    def _refusal(self, field: str, fix: str) -> ConfigError:
        return ConfigError(field, getattr(self, field), fix)

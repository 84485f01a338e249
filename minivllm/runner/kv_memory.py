"""How many KV blocks there are, and whether they are enough: plain arithmetic, kept as a record that can be printed.

Source: vLLM 0.32 `v1/core/kv_cache_utils.py:get_kv_cache_configs`, `_check_enough_kv_cache_memory` (one request of full
length must fit beside the null block) and, for "auto", `_auto_fit_max_model_len`. There every worker counts for itself
and the fewest blocks are everybody's; here ranks agree on free memory first (`engine/procs.py:agree_on_free_memory`).
Left out: layers of unlike shapes, and models without attention. `kv_memory_fraction`, a share of what is free, is for
CPUs, where other programs come and go; it has no counterpart there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minivllm.calc.hw import gib
from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.kv.hybrid import Windows, form_groups, longest_request, request_blocks
from minivllm.models.decoder import resolve_device
from minivllm.runner.device_memory import DeviceMemory, kv_budget, read_memory


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The KV cache's size. Block 0 is the null block, which pads block tables and is never used.

    `windows` has the window of each layer group (`kv/hybrid.py`); `bytes_per_token` are those of a token in one group.
    """

    source: str  # the setting that decided
    bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int
    windows: Windows
    blocks_per_request: int  # the most that one of max_model_len tokens holds at once

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def tokens(self) -> int:
        """How many tokens fit in all: with layer groups, in requests of `max_model_len`."""
        blocks = -(-self.max_model_len // self.block_size)
        return self.usable_blocks * self.block_size * blocks // self.blocks_per_request

    @property
    def max_concurrency(self) -> float:
        """How many requests of `max_model_len` tokens fit at once."""
        return self.usable_blocks / self.blocks_per_request

    def __str__(self) -> str:
        groups = f" in each of {len(self.windows)} layer groups" if len(self.windows) > 1 else ""
        return (
            f"KV cache: {self.num_blocks:,} blocks of {self.block_size} tokens (from {self.source}). A token takes "
            f"{self.bytes_per_token:,} bytes{groups}, a block {self.block_bytes:,}, the cache "
            f"{gib(self.num_blocks * self.block_bytes)} when full. Block 0 is the null block, so "
            f"{self.tokens:,} tokens fit: {self.max_concurrency:.1f} requests of {self.max_model_len:,} tokens at once."
        )


def plan_kv_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    memory: DeviceMemory | None = None,
    draft: ModelConfig | None = None,
) -> KVMemory:
    """Size the KV cache: `num_kv_blocks`, else `kv_cache_memory` bytes, else what `memory_utilization` leaves, else
    `kv_memory_fraction` of free memory.

    A `max_model_len` that was asked for must fit; "auto" is the model's own, or the largest that fits if that is less.
    `memory` is the device that the model lies on (None: this machine's). A `draft` model keeps its KV in the same
    blocks. Raises `ConfigError` with the arithmetic, also where the blocks find no room in it.
    """
    groups = form_groups(model.windows, config.hybrid)
    windows = tuple(group.window for group in groups)
    num_pages = max(len(group.layers) for group in groups)
    bytes_per_token = model.kv_bytes_per_token(dtype.itemsize) * num_pages // model.num_layers
    if draft is not None:
        bytes_per_token += draft.kv_bytes_per_token(dtype.itemsize)
    memory = memory or read_memory(resolve_device(config.device))
    source, num_blocks = _count_blocks(config, bytes_per_token * config.block_size, memory)
    _check_room(config, source, num_blocks, bytes_per_token * config.block_size, memory)
    fits = longest_request(num_blocks - 1, windows, config, model.max_position)
    if fits < 1:
        least = f"{len(windows) + 1} are the least, one of them the null block, and it makes {num_blocks}"
        raise ConfigError(source, getattr(config, source), f"gives no usable block: {least}")
    length = fits if config.max_model_len == "auto" else config.max_model_len
    needed = request_blocks(length, windows, config)
    planned = KVMemory(source, bytes_per_token, config.block_size, num_blocks, length, windows, needed)
    _check_max_model_len(planned, model.max_position, fits)
    return planned


def _count_blocks(config: EngineConfig, block_bytes: int, memory: DeviceMemory) -> tuple[str, int]:
    if config.num_kv_blocks is not None:
        return "num_kv_blocks", config.num_kv_blocks
    if config.kv_cache_memory is not None:
        return "kv_cache_memory", config.kv_cache_memory // block_bytes
    if config.memory_utilization is not None:
        return "memory_utilization", kv_budget(memory, config, config.memory_utilization) // block_bytes
    return "kv_memory_fraction", int(memory.left_bytes * config.kv_memory_fraction) // block_bytes


def _check_room(config: EngineConfig, source: str, num_blocks: int, block_bytes: int, memory: DeviceMemory) -> None:
    """All blocks must find room, on a CPU those of the host tier too: memory is given out before it is there."""
    in_host = config.host_kv_blocks if resolve_device(config.device).type == "cpu" else 0
    if (asked := (num_blocks + in_host) * block_bytes) > memory.left_bytes:
        what = f"{num_blocks:,} blocks" + (f" and {in_host:,} of host_kv_blocks" if in_host else "")
        fix = f"{what} take {gib(asked)}, but {gib(memory.left_bytes)} are free; ask for less, or end other programs"
        raise ConfigError(source, getattr(config, source), fix)


def _check_max_model_len(memory: KVMemory, max_position: int, fits: int) -> None:
    """One request of full length must fit, or it could never finish: preempting others frees only what they hold."""
    length, needed = memory.max_model_len, memory.blocks_per_request
    if length > max_position:
        raise ConfigError("max_model_len", length, f"the model was made for at most {max_position:,} positions")
    if needed > memory.usable_blocks:
        size, missing = memory.block_bytes, needed - memory.usable_blocks
        more = f"num_kv_blocks to at least {needed + 1:,}, or kv_cache_memory to {(needed + 1) * size:,} bytes"
        if memory.source == "memory_utilization":
            more = f"or make room for {gib(missing * size)} more: a larger memory_utilization, a smaller model or dtype"
        raise ConfigError(
            "max_model_len",
            length,
            f"one such request needs {needed:,} blocks of {memory.block_size} tokens, {gib(needed * size)}, but "
            f"{memory.source} gives {memory.num_blocks:,}, {gib(memory.num_blocks * size)}, of which block 0 is the null "
            f"block; set max_model_len to at most {fits:,}, {more}",
        )

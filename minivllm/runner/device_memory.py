"""What a device's memory goes to before there is a KV cache: measured, or made up to try a device of any size.

Source: vLLM 0.32 `v1/worker/utils.py:request_memory` (what is asked for must be free), `utils/mem_utils.py:
memory_profiling` and `v1/worker/gpu_worker.py:Worker.determine_available_memory`. There the driver tells what stays
taken and torch's allocator the peak of a made-up step; here, where a CPU has neither, both are seen from outside. Left
out: sampling in that step, and an estimate of what CUDA graphs will take, from capturing a few (`profile_cudagraph_memory`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

import psutil  # type: ignore[import-untyped]
import torch

from minivllm.calc.hw import gib
from minivllm.config import ConfigError, EngineConfig
from minivllm.models.decoder import Decoder
from minivllm.runner.attention import layer_ops, pick_backend
from minivllm.runner.host import keep_freed_memory

SAMPLE_EVERY = 0.0005  # seconds; a layer of a profiled step takes several milliseconds


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory and what start-up takes of it, in bytes. The arithmetic asks for no more than this, so that a
    made-up one simulates a device of any size, with any model on it.

    `used_bytes` were taken before the engine started, by whatever else runs. `loaded_bytes` is what weights and tokenizer
    take, `activation_bytes` what a step of `max_num_batched_tokens` takes at its peak; None: not measured yet.
    """

    total_bytes: int
    used_bytes: int = 0
    loaded_bytes: int | None = None
    activation_bytes: int | None = None

    @property
    def taken_bytes(self) -> int:
        """What the engine takes beside KV."""
        return (self.loaded_bytes or 0) + (self.activation_bytes or 0)

    @property
    def left_bytes(self) -> int:
        """What nobody has taken."""
        return self.total_bytes - self.used_bytes - self.taken_bytes


def read_memory(device: torch.device) -> DeviceMemory:
    """The device as it is now: a GPU, or RAM that can be had without swapping."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, total - free)
    memory = psutil.virtual_memory()
    return DeviceMemory(memory.total, memory.total - memory.available)


# the budget of `memory_utilization`


def asked_share(config: EngineConfig) -> float | None:
    """`memory_utilization` where it decides: a size given for the KV cache wins over it, and then nothing is profiled."""
    sized = config.num_kv_blocks is not None or config.kv_cache_memory is not None
    return None if sized else config.memory_utilization


def check_free(memory: DeviceMemory, config: EngineConfig) -> None:
    """What the engine may take must be free when it starts, or another program is in the way. Raises `ConfigError`."""
    share, free = asked_share(config), memory.total_bytes - memory.used_bytes
    if share is not None and math.ceil(memory.total_bytes * share) > free:
        raise ConfigError(
            "memory_utilization",
            share,
            f"asks for {gib(memory.total_bytes * share)} of {gib(memory.total_bytes)}, but {gib(free)} are free; set it "
            f"to at most {math.floor(100 * free / memory.total_bytes) / 100:.2f}, or end what takes the other "
            f"{gib(memory.used_bytes)}",
        )


def kv_budget(memory: DeviceMemory, config: EngineConfig, share: float) -> int:
    """Bytes for KV: the share of the whole device that the engine may take, less weights and the peak of a step.

    Raises `ConfigError` with the arithmetic if nothing is left. Order and arithmetic as in vLLM 0.32
    `v1/worker/gpu_worker.py:Worker.determine_available_memory`, which also counts CUDA graphs.
    """
    left = math.ceil(memory.total_bytes * share) - memory.taken_bytes
    if left <= 0:
        least = math.floor(100 * memory.taken_bytes / memory.total_bytes + 1) / 100
        more = f"raise it to at least {least:.2f}, " if least < 1 else ""
        raise ConfigError(
            "memory_utilization",
            share,
            f"of {gib(memory.total_bytes * share)} the weights take {gib(memory.loaded_bytes or 0)} and a step of "
            f"{config.max_num_batched_tokens:,} tokens {gib(memory.activation_bytes or 0)}, which leaves {gib(left)} for "
            f"KV; {more}lower max_num_batched_tokens, or take a smaller model or dtype",
        )
    return left


# measuring


def held_bytes(device: torch.device) -> int:
    """Bytes held now: of RAM by this process (resident), of a GPU by everybody."""
    if device.type == "cuda":
        return read_memory(device).used_bytes
    return psutil.Process().memory_info().rss


@torch.inference_mode()
def profile_step(model: Decoder, config: EngineConfig) -> int:
    """Run a step of `max_num_batched_tokens` made-up tokens; the bytes that it takes at its peak beside weights and KV.

    Logits are those of `max_num_seqs` rows, as many as a step samples at most. Without attention, as there is no KV yet:
    what attention takes for long contexts isn't seen, nor is what sampling takes.
    """
    if model.device.type == "cpu":
        keep_freed_memory()
    ops = layer_ops(pick_backend(config.attention_backend, model.device.type, model).name)
    positions = torch.arange(config.max_num_batched_tokens, device=model.device) % model.config.max_position
    with watch_peak(model.device) as samples:
        hidden = model.forward(torch.zeros_like(positions), positions, lambda layer, q, k, v: q, ops)
        model.logits(hidden[: config.max_num_seqs], ops)
    return max(samples) - samples[0]


@contextmanager
def watch_peak(device: torch.device) -> Iterator[list[int]]:
    """Sample `held_bytes` from a second thread while the block runs: large tensors are given back at once, so that
    looking afterwards would miss them. The first sample is from before the block, the last from after it."""
    samples, over = [held_bytes(device)], Event()

    def watch() -> None:
        while not over.wait(SAMPLE_EVERY):
            samples.append(held_bytes(device))

    with ThreadPoolExecutor(1, "memory") as pool:
        pool.submit(watch)
        try:
            yield samples
        finally:
            over.set()
    samples.append(held_bytes(device))

"""Whether a model fits a GPU before anybody rents one: the memory budget of a start-up, line by line."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from minivllm.calc.hw import DEVICES, GIB, Device
from minivllm.calc.memory import HybridKV, block_bytes, hybrid_kv
from minivllm.calc.models import SHAPES, Shape

# What an H100 was seen to take beside weights and KV, with steps of 8,192 tokens and up to 1,024 sequences.
STEP_TOKENS = 8192
ACTIVATION_BYTES, GRAPH_BYTES, OTHER_BYTES = round(1.5 * GIB), round(0.6 * GIB), round(0.9 * GIB)


@dataclass(frozen=True, slots=True)
class Budget:
    """What each of `tp` equal GPUs holds, in bytes, and what that leaves for KV. Weights and KV heads are split.

    `memory_utilization` is the share of the GPU that the engine may take. `activation_bytes` is the peak of a step, `graph_bytes`
    are those of CUDA graphs, `other_bytes` those of the CUDA context and communication buffers. In a layer with a sliding
    window a request is counted with its window and a step of `max_num_batched_tokens`, as an engine with layer groups
    does. Raises `ValueError` for values out of range, and for a model whose layers all have a window: nothing bounds it.
    """

    shape: Shape
    device: Device
    max_model_len: int | Literal["auto"] = "auto"
    tp: int = 1
    memory_utilization: float = 0.92
    block_size: int = 16
    weight_bits: int = 16
    kv_bits: int = 16
    activation_bytes: int = ACTIVATION_BYTES
    graph_bytes: int = GRAPH_BYTES
    other_bytes: int = OTHER_BYTES
    max_num_batched_tokens: int = STEP_TOKENS

    def __post_init__(self) -> None:
        for field in ("tp", "block_size", "weight_bits", "max_model_len", "max_num_batched_tokens"):
            if (value := getattr(self, field)) != "auto" and value < 1:
                raise ValueError(f"{field}={value}: must be at least 1")
        if self.kv_bits not in (8, 16):
            raise ValueError(f"kv_bits={self.kv_bits}: must be 8 or 16")
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(f"memory_utilization={self.memory_utilization}: must be in (0, 1], a share of the GPU")
        if None not in self.shape.windows:
            raise ValueError(f"shape={self.shape.name!r}: must have a layer that attends to everything")
        block_bytes(self.shape, self.block_size, self.tp)  # raises where tp doesn't suit the KV heads

    @property
    def total_bytes(self) -> int:
        """What the GPU has: as programs are told, or by its label where that isn't known."""
        return self.device.usable_bytes or self.device.memory_bytes

    @property
    def requested_bytes(self) -> int:
        return math.ceil(self.total_bytes * self.memory_utilization)

    @property
    def weight_bytes(self) -> int:
        return math.ceil(self.shape.parameters * self.weight_bits / 8 / self.tp)

    @property
    def kv_budget(self) -> int:
        """What is left for KV; negative where weights and overheads alone are too much."""
        taken = self.weight_bytes + self.activation_bytes + self.graph_bytes + self.other_bytes
        return self.requested_bytes - taken

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.shape, self.block_size, self.tp, self.kv_bits // 8)

    @property
    def num_blocks(self) -> int:
        """Blocks in the budget, the null block among them."""
        return max(self.kv_budget // self.block_bytes, 0)

    @property
    def longest(self) -> int:
        """The longest request that memory has room for, in tokens: in all blocks but the null block. 0 where none fits."""
        lengths = range(0, self.num_blocks * self.block_size, self.block_size)
        return self.block_size * max(
            bisect_right(lengths, self.usable_kv_bytes, key=lambda n: self._kv(n).reserved) - 1, 0
        )

    @property
    def length(self) -> int:
        """`max_model_len`, or the longest that fits and that the model was made for."""
        return self._possible if self.max_model_len == "auto" else self.max_model_len

    @property
    def usable_kv_bytes(self) -> int:
        """Those of all blocks but the null block."""
        return max(self.num_blocks - 1, 0) * self.block_bytes

    @property
    def needed_bytes(self) -> int:
        """KV to count on for one request of full length."""
        return self._kv(self.length).reserved

    @property
    def one_table_bytes(self) -> int:
        """KV of one request of full length if no layer gave anything up: more than `needed_bytes` where windows save."""
        return self._kv(self.length).one_table

    @property
    def fits(self) -> bool:
        """Whether an engine would start: one request of full length must fit, and be no longer than the model's own."""
        return 0 < self.length <= self._possible

    @property
    def concurrency(self) -> float:
        """How many requests of full length fit at once."""
        return self.usable_kv_bytes / max(self.needed_bytes, 1)

    @property
    def _possible(self) -> int:
        return min(self.longest, self.shape.max_position)

    def _kv(self, length: int) -> HybridKV:
        in_flight, element_bytes = self.max_num_batched_tokens, self.kv_bits // 8
        return hybrid_kv(self.shape, length, self.block_size, in_flight, self.tp, element_bytes)


Entry = TypeVar("Entry", Shape, Device)


def find_shape(name: str) -> Shape:
    """The model of `SHAPES` that is meant. Raises `ValueError` with the known names unless it's exactly one."""
    return _find("model", name, SHAPES)


def find_device(name: str) -> Device:
    """The device of `DEVICES` that is meant. Raises `ValueError` with the known names unless it's exactly one."""
    return _find("gpu", name, DEVICES)


def _find(field: str, name: str, entries: Iterable[Entry]) -> Entry:
    """By its whole name, else by a beginning that is only one's. Upper case, spaces and punctuation don't matter."""
    named = {_slug(entry.name): entry for entry in entries}
    meant = [entry for slug, entry in named.items() if slug.startswith(_slug(name))]
    if _slug(name) in named:
        return named[_slug(name)]
    if len(meant) != 1 or not _slug(name):
        raise ValueError(f"{field}={name!r}: must be one of {', '.join(entry.name for entry in named.values())}")
    return meant[0]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())

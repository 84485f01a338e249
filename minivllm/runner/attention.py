"""Paged attention: K and V of a step go into the cache, then each token attends to its own past through a block table.

`ReferenceAttention` is the definition. `TorchAttention` computes the same numbers in as few torch calls as it can;
`CppAttention` reads the past of decodes where it is, with a kernel in C++; `TritonAttention` does so for all rows, on a GPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from minivllm.config import ConfigError
from minivllm.models import layers
from minivllm.models.decoder import Attention, Decoder
from minivllm.models.layers import LayerOps
from minivllm.runner.input_batch import InputBatch
from minivllm.runner.kv_cache import KVCache
from minivllm_kernels import cpu
from minivllm_kernels.gpu import ops as gpu

log = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """How a step attends. K and V of all rows are stored before any row attends: a row may share a prefix block that
    another row of the same step fills."""

    def prepare(self, batch: InputBatch) -> Attention:
        """What the decoder calls, layer by layer, for the rows of this step; what all layers share is computed here."""
        ...


class ReferenceAttention:
    """Token by token, slot by slot, in float32 or better: slow, and obviously right."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def prepare(self, batch: InputBatch) -> Attention:
        """See `AttentionBackend`."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, self.cache.rows_to_write(batch.slot_mapping), k, v)
            rows = zip(batch.query_starts, batch.query_starts[1:], batch.starts, batch.block_tables, strict=False)
            outputs = []
            for begin, end, start, table in rows:
                for offset, query in enumerate(q[begin:end]):
                    seen = start + offset + 1
                    first = max(seen - batch.window, 0) if batch.window else 0
                    outputs.append(attend_one(query, *self._gather(layer, table, range(first, seen))))
            return torch.stack(outputs).to(q.dtype)

        return attend

    def _gather(self, layer: int, table: Tensor, positions: range) -> tuple[Tensor, Tensor]:
        """K and V of S positions, each [S, Hkv, D]."""
        size = self.cache.block_size
        slots = [int(table[position // size]) * size + position % size for position in positions]
        k, v = torch.stack([self.cache.layers[layer][:, slot] for slot in slots]).chunk(2, 1)
        return k, v


def attend_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One token's attention: query [H, D] over keys and values [S, Hkv, D] -> [H, D], float32 or better.

    Query head h reads KV head h // (H / Hkv). Vaswani et al. 2017; grouped heads: Ainslie et al., "GQA", 2023.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[0] // keys.shape[1]
    output = []
    for head, vector in enumerate(query.to(wide)):
        scores = keys[:, head // group].to(wide) @ vector / math.sqrt(len(vector))
        output.append(torch.softmax(scores, 0) @ values[:, head // group].to(wide))
    return torch.stack(output)


class TorchAttention:
    """Attention as few, large matrix products. Rows of one token (decodes) share them, bucketed by context length; a
    longer row (a prefill chunk) has its own."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def prepare(self, batch: InputBatch) -> Attention:
        """See `AttentionBackend`."""
        write = self._writer(batch)
        parts = self._parts(batch)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            write(layer, k, v)
            output = torch.empty_like(q, memory_format=torch.contiguous_format)
            for part in parts:
                part.attend(layer, q, output)
            return output

        return attend

    def _writer(self, batch: InputBatch) -> Callable[[int, Tensor, Tensor], None]:
        rows = self.cache.rows_to_write(batch.slot_mapping)
        return lambda layer, k, v: self.cache.write(layer, rows, k, v)

    def _parts(self, batch: InputBatch) -> list[Part]:
        lengths = batch.context_lengths
        one_token = [lengths[row] - start == 1 for row, start in enumerate(batch.starts)]
        decodes = [row for row, one in enumerate(one_token) if one]
        parts: list[Part] = [PrefillPart(self.cache, batch, row) for row, one in enumerate(one_token) if not one]
        return parts + self._decodes(batch, decodes)

    def _decodes(self, batch: InputBatch, decodes: list[int]) -> list[Part]:
        parts: list[Part] = []
        for bucket in bucket_by_length([batch.context_lengths[row] for row in decodes]):
            rows = [decodes[index] for index in bucket]
            parts.append(DecodePart(self.cache, batch, rows))
        return parts


class CppAttention(TorchAttention):
    """Decodes read K and V where the cache has them: no gather, no padding, no mask. Prefill chunks as in
    `TorchAttention`: there matrix products pay for the gather many times over."""

    def _writer(self, batch: InputBatch) -> Callable[[int, Tensor, Tensor], None]:
        return lambda layer, k, v: cpu.store_kv(k, v, batch.slot_mapping, self.cache.layers[layer])

    def _decodes(self, batch: InputBatch, decodes: list[int]) -> list[Part]:
        return [PagedDecodePart(self.cache, batch, decodes)] if decodes else []


class TritonAttention:
    """All rows in one launch. A step of decodes takes nothing from the CPU but addresses, so that a CUDA graph can replay
    it (`runner/cuda_graphs.py`)."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def prepare(self, batch: InputBatch) -> Attention:
        """See `AttentionBackend`."""
        decodes = len(batch.starts) == len(batch.token_ids)
        starts = None if decodes else torch.tensor(batch.query_starts, device=batch.lengths.device)
        rows = batch.block_tables, batch.lengths, starts, self.cache.block_size, batch.window

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            gpu.store_kv(k, v, batch.slot_mapping, self.cache.layers[layer])
            return gpu.paged_attention(q, self.cache.layers[layer], *rows)

        return attend


class Part(Protocol):
    """Some rows of a step that attend together."""

    def attend(self, layer: int, q: Tensor, output: Tensor) -> None:
        """Fill this part's tokens of `output` from its tokens of q, both [T, H, D]."""
        ...


class PagedDecodePart:
    """All rows of one token, each over its own blocks."""

    def __init__(self, cache: KVCache, batch: InputBatch, rows: list[int]) -> None:
        self.cache = cache
        self.tokens = torch.tensor([batch.query_starts[row] for row in rows])
        self.tables = batch.block_tables[rows]
        self.lengths = batch.lengths[rows]
        self.window = batch.window

    def attend(self, layer: int, q: Tensor, output: Tensor) -> None:
        """See `Part`."""
        where = self.tokens, self.tables, self.lengths, self.cache.block_size
        cpu.paged_decode(q, self.cache.layers[layer], *where, output, self.window)


ALLOWED_PADDING = 1024
"""Slots that a bucket may gather in vain: about what a bucket more would cost instead."""

LENGTH_STEP = 64
"""Padded lengths are multiples of this: oneDNN builds and keeps a kernel for each shape, so shapes should recur."""


def bucket_by_length(lengths: list[int], allowed_padding: int = ALLOWED_PADDING) -> list[list[int]]:
    """Group indices of `lengths`, longest first, so that padding each group to its longest wastes at most
    `allowed_padding` in a group."""
    buckets: list[list[int]] = []
    padding = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        padding += lengths[buckets[-1][0]] - lengths[index] if buckets else 0
        if not buckets or padding > allowed_padding:
            buckets.append([])
            padding = 0
        buckets[-1].append(index)
    return buckets


class DecodePart:
    """B rows of one token over contexts padded to S. Query heads that share a KV head are rows of one product:
    [Hkv * B, G, D] against [Hkv * B, S, D], so K and V are neither repeated nor read twice."""

    def __init__(self, cache: KVCache, batch: InputBatch, rows: list[int]) -> None:
        self.cache = cache
        lengths = [batch.context_lengths[row] for row in rows]
        step = math.lcm(LENGTH_STEP, cache.block_size)
        count = -(-max(lengths) // step) * step // cache.block_size
        self.length = count * cache.block_size
        self.tokens = torch.tensor([batch.query_starts[row] for row in rows], device=batch.slot_mapping.device)
        self.past = cache.runs_to_read(batch.blocks(rows, count).flatten())
        self.unwritten = batch.unwritten(rows, count).flatten().repeat(2 * cache.num_kv_heads).nonzero()[:, 0]
        self.mask = self._mask(torch.tensor(lengths, device=self.tokens.device), batch.window)

    def _mask(self, lengths: Tensor, window: int | None) -> Tensor:
        """0 where a row attends, and -inf before its window and in its padding: [Hkv * B, 1, S]."""
        positions = torch.arange(self.length, device=lengths.device)
        outside = positions >= lengths[:, None]
        if window is not None:
            outside |= positions < lengths[:, None] - window
        mask = torch.zeros(outside.shape, dtype=self.cache.layers[0].dtype, device=lengths.device)
        return mask.masked_fill_(outside, -math.inf).repeat(self.cache.num_kv_heads, 1)[:, None]

    def attend(self, layer: int, q: Tensor, output: Tensor) -> None:
        """See `Part`."""
        heads, dim = self.cache.num_kv_heads, self.cache.head_dim
        past = self.cache.read(layer, self.past)
        past.view(-1, dim).index_fill_(0, self.unwritten, 0)  # masked or not, NaN times zero is NaN
        k, v = past.view(2, -1, self.length, dim)
        queries = q.index_select(0, self.tokens).view(len(self.tokens), heads, -1, dim)
        queries = queries.transpose(0, 1).reshape(len(k), -1, dim)
        scores = torch.baddbmm(self.mask, queries, k.transpose(1, 2), alpha=dim**-0.5)
        attended = torch.bmm(torch.softmax(scores, -1), v).view(heads, len(self.tokens), -1, dim)
        output.index_copy_(0, self.tokens, attended.transpose(0, 1).flatten(1, 2))


QUERY_CHUNK = 256
"""Queries of a prefill row that attend at once: the scores of a chunk stay in the cache of the CPU."""


class PrefillPart:
    """One row of several tokens. A chunk of queries attends to all that comes before it and, masked, to itself."""

    def __init__(self, cache: KVCache, batch: InputBatch, row: int) -> None:
        self.cache = cache
        self.begin, self.end = batch.query_starts[row : row + 2]
        self.start = batch.starts[row]
        self.past = cache.runs_to_read(batch.blocks([row], -(-batch.context_lengths[row] // cache.block_size))[0])
        size = min(QUERY_CHUNK, self.end - self.begin)
        self.window, self.reach = batch.window, (batch.window or 1) - 1
        mask = torch.full((size, self.reach + size), -math.inf, dtype=cache.layers[0].dtype, device=self.past.device)
        self.mask = mask.triu(self.reach + 1) + mask.tril(-1) if batch.window else mask.triu_(1)

    def attend(self, layer: int, q: Tensor, output: Tensor) -> None:
        """See `Part`."""
        k, v = self.cache.read(layer, self.past)
        for begin in range(self.begin, self.end, QUERY_CHUNK):
            end = min(begin + QUERY_CHUNK, self.end)
            seen = self.start + end - self.begin
            first = max(seen - (end - begin) - self.reach, 0) if self.window else 0
            output[begin:end] = self._attend_chunk(q[begin:end], k[:, first:seen], v[:, first:seen])

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The last C of S tokens: q [C, H, D], k and v [Hkv, S, D] -> [C, H, D]."""
        (size, heads, dim), planes = q.shape, len(k)
        queries = q.transpose(0, 1).reshape(planes, -1, dim)
        ignored = queries.new_empty(())
        scores = torch.baddbmm(ignored, queries, k.transpose(1, 2), beta=0, alpha=dim**-0.5)
        band = self.mask[:size, : self.reach + size][:, -k.shape[1] :]
        scores.view(heads, size, -1)[:, :, -band.shape[1] :].add_(band)
        return torch.bmm(torch.softmax(scores, -1), v).view(heads, size, dim).transpose(0, 1)


BACKENDS: dict[str, Callable[[KVCache], AttentionBackend]] = {
    "triton": TritonAttention,
    "cpp": CppAttention,
    "torch": TorchAttention,
    "reference": ReferenceAttention,
}


KERNELS: dict[str, Any] = {"triton": gpu, "cpp": cpu}
"""What kernels are there besides torch's, by backend: each tells whether it can run, and has `LayerOps`."""


class Backend(NamedTuple):
    """Which of `BACKENDS` runs, and why this one."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def pick_backend(wanted: str, device: str, model: Decoder | None = None) -> Backend:
    """Which backend runs a model, or any that its kernels support, on a device ("cpu", "cuda"): the wanted one; for `auto`
    Triton on a GPU and C++ on a CPU where they can be had, else torch, with the reason once in the log.

    Raises `ConfigError` if kernels are asked for that can't be had.
    """
    name = wanted if wanted != "auto" else "triton" if device == "cuda" else "cpp"
    reason = why_not(name, device, model)
    if reason is None:
        return Backend(name, "asked for" if name == wanted else f"the fastest on {device}")
    if name == wanted:
        raise ConfigError("attention_backend", wanted, f"can't be had: {reason}; use torch, or auto")
    log_fallback(name, reason)
    return Backend("torch", f"no {name}: {reason}")


def why_not(backend: str, device: str, model: Decoder | None) -> str | None:
    """Why a backend's kernels can't run a model, or any, on this machine's device; None if they can, or if it has none."""
    if (kernels := KERNELS.get(backend)) is None:
        return None
    if model and (reason := kernels.supports(model.dtype, model.config)):
        return reason
    return kernels.why_not(device)


@cache
def log_fallback(lost: str, reason: str) -> None:
    """Say once for each reason that torch does the work of kernels: a warning on a GPU, which stands idle without them."""
    level = logging.WARNING if lost == "triton" else logging.INFO
    log.log(level, "attention and layers run in torch, without the kernels of %s: %s", lost, reason)


def layer_ops(backend: str) -> LayerOps:
    """What runs between the matrix products where attention runs on this backend."""
    return KERNELS.get(backend, layers)

"""Paged attention: K and V of a step go into the cache, then each token attends to its own past through a block table.

`ReferenceAttention` is the definition. `TorchAttention` computes the same numbers in as few torch calls as it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.decoder import Attention
from minivllm.runner.input_batch import InputBatch
from minivllm.runner.kv_cache import KVCache


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
            self.cache.write(layer, batch.slot_mapping, k, v)
            rows = zip(batch.query_starts, batch.query_starts[1:], batch.starts, batch.block_tables, strict=False)
            outputs = []
            for begin, end, start, table in rows:
                for offset, query in enumerate(q[begin:end]):
                    past = self._gather(layer, table, start + offset + 1)
                    outputs.append(attend_one(query, past[:, 0], past[:, 1]))
            return torch.stack(outputs).to(q.dtype)

        return attend

    def _gather(self, layer: int, table: Tensor, length: int) -> Tensor:
        """K and V of positions 0 .. length - 1: [length, 2, Hkv, D]."""
        size = self.cache.block_size
        slots = [int(table[position // size]) * size + position % size for position in range(length)]
        return torch.stack([self.cache.layers[layer][slot] for slot in slots])


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
    """Rows of one token batched over padded contexts, longer rows one by one."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def prepare(self, batch: InputBatch) -> Attention:
        """See `AttentionBackend`."""
        lengths = [end - begin for begin, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        parts = [self._plan_decodes(batch, [r for r, length in enumerate(lengths) if length == 1])]
        parts += [self._plan_prefill(batch, r) for r, length in enumerate(lengths) if length > 1]
        slots = batch.slot_mapping

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, slots, k, v)
            output = torch.empty_like(q)
            for part in parts:
                part(layer, q, output)
            return output

        return attend

    def _plan_decodes(self, batch: InputBatch, rows: list[int]) -> Callable[[int, Tensor, Tensor], None]:
        tokens = torch.tensor([batch.query_starts[row] for row in rows], dtype=torch.int64)
        lengths = torch.tensor([batch.context_lengths[row] for row in rows])
        longest = int(lengths.max()) if rows else 0
        slots = batch.slots(rows, longest).view(-1) if rows else tokens
        mask = torch.arange(longest)[None, None, None] < lengths[:, None, None, None] if rows else None

        def attend(layer: int, q: Tensor, output: Tensor) -> None:
            if not rows:
                return
            cache = self.cache.layers[layer]
            kv = cache.index_select(0, slots).view(len(rows), longest, *cache.shape[1:])
            k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
            folded = q.index_select(0, tokens).unflatten(1, (k.shape[1], -1))
            attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
            output.index_copy_(0, tokens, attended.flatten(1, 2))

        return attend

    def _plan_prefill(self, batch: InputBatch, row: int) -> Callable[[int, Tensor, Tensor], None]:
        begin, end, start = batch.query_starts[row], batch.query_starts[row + 1], batch.starts[row]
        length = batch.context_lengths[row]
        slots = batch.slots([row], length)[0]
        mask = torch.arange(length) <= torch.arange(start, length)[:, None] if start else None

        def attend(layer: int, q: Tensor, output: Tensor) -> None:
            past = self.cache.layers[layer].index_select(0, slots)
            k, v = past[:, 0].transpose(0, 1)[None], past[:, 1].transpose(0, 1)[None]
            attended = F.scaled_dot_product_attention(
                q[begin:end].transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=start == 0, enable_gqa=True
            )
            output[begin:end] = attended[0].transpose(0, 1)

        return attend


def make_attention(name: str, cache: KVCache) -> AttentionBackend:
    """The backend that `EngineConfig.attention_backend` names."""
    return ReferenceAttention(cache) if name == "reference" else TorchAttention(cache)

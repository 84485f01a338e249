"""Touches what it finds: a request that is not admitted after all keeps the blocks for ever."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from minivllm.course import solves
from minivllm.kv.block_pool import Block
from minivllm.kv.prefix import Index


@solves("minivllm.kv.prefix:longest_hit")
def longest_hit(hashes: Seq[bytes], num_tokens: int, block_size: int, index: Index) -> list[Block]:
    hits: list[Block] = []
    for block_hash in hashes[: max(num_tokens - 1, 0) // block_size]:
        block = index.find(block_hash)
        if block is None:
            break
        if hasattr(index, "touch"):
            index.touch([block])
        hits.append(block)
    return hits

"""Takes the whole prompt from the cache when it can: a prefill of no tokens has no logits (nano-vllm #144, #199)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from minivllm.course import solves
from minivllm.kv.block_pool import Block
from minivllm.kv.prefix import Index


@solves("minivllm.kv.prefix:longest_hit")
def longest_hit(hashes: Seq[bytes], num_tokens: int, block_size: int, index: Index) -> list[Block]:
    hits: list[Block] = []
    for block_hash in hashes[: num_tokens // block_size]:
        block = index.find(block_hash)
        if block is None:
            break
        hits.append(block)
    return hits

"""Always leaves a whole block to compute, also where one token would do."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from minivllm.course import solves
from minivllm.kv.block_pool import Block
from minivllm.kv.prefix import Index


@solves("minivllm.kv.prefix:longest_hit")
def longest_hit(hashes: Seq[bytes], num_tokens: int, block_size: int, index: Index) -> list[Block]:
    hits: list[Block] = []
    for block_hash in hashes[: max(num_tokens // block_size - 1, 0)]:
        block = index.find(block_hash)
        if block is None:
            break
        hits.append(block)
    return hits

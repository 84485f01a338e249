"""Collects all blocks that are cached, also behind a gap: the table no longer matches the positions."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from minivllm.course import solves
from minivllm.kv.block_pool import Block
from minivllm.kv.prefix import Index


@solves("minivllm.kv.prefix:longest_hit")
def longest_hit(hashes: Seq[bytes], num_tokens: int, block_size: int, index: Index) -> list[Block]:
    found = [index.find(block_hash) for block_hash in hashes[: max(num_tokens - 1, 0) // block_size]]
    return [block for block in found if block is not None]

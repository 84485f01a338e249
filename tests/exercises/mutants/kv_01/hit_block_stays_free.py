"""A hit raises the count and leaves the block in the free list: it is evicted while somebody reads it."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.course import solves
from minivllm.kv.block_pool import NULL_BLOCK, Block


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.touch")
    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.id != NULL_BLOCK:
                block.ref_count += 1

"""A hit holds its last block only: those before it may go at any time."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.course import solves
from minivllm.kv.block_pool import NULL_BLOCK, Block


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.touch")
    def touch(self, blocks: Iterable[Block]) -> None:
        for block in list(blocks)[-1:]:
            if block.id != NULL_BLOCK:
                if block.ref_count == 0:
                    self.free_list.remove(block)
                block.ref_count += 1

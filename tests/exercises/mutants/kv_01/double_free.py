"""Does not look whether a block is held: freed twice, it is handed out twice."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.course import solves
from minivllm.kv.block_pool import NULL_BLOCK, Block


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.free")
    def free(self, blocks: Iterable[Block]) -> None:
        unhashed = []
        for block in blocks:
            if block.id == NULL_BLOCK:
                continue
            block.ref_count = max(block.ref_count - 1, 0)
            if block.ref_count == 0 and block.prev is None:
                if block.hash is None and self.lifo_unhashed:
                    unhashed.append(block)
                else:
                    self.free_list.append(block)
        for block in reversed(dict.fromkeys(unhashed)):
            self.free_list.prepend(block)

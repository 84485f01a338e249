"""The null block is counted and freed like any other, and so handed out in the end."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.course import solves
from minivllm.kv.block_pool import Block


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.touch")
    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.ref_count == 0 and block.prev is not None:
                self.free_list.remove(block)
            block.ref_count += 1

    @solves("minivllm.kv.block_pool:BlockPool.free")
    def free(self, blocks: Iterable[Block]) -> None:
        blocks = list(blocks)
        if any(blocks.count(block) > block.ref_count for block in blocks):
            raise ValueError("freed too often")
        unhashed = []
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.hash is None and self.lifo_unhashed:
                    unhashed.append(block)
                else:
                    self.free_list.append(block)
        for block in reversed(unhashed):
            self.free_list.prepend(block)

"""Finds out that a block is freed too often after others were freed: an error that changes something."""

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
            if block.ref_count == 0:
                raise ValueError(f"block {block.id} is freed more often than it is held")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.hash is None and self.lifo_unhashed:
                    unhashed.append(block)
                else:
                    self.free_list.append(block)
        for block in reversed(unhashed):
            self.free_list.prepend(block)

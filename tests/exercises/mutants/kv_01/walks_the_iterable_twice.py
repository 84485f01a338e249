"""Checks the references of a generator and then frees what is left in it: nothing."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.course import solves
from minivllm.kv.block_pool import NULL_BLOCK, Block


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.free")
    def free(self, blocks: Iterable[Block]) -> None:
        drops: dict[int, int] = {}
        for block in blocks:
            drops[block.id] = drops.get(block.id, 0) + 1
            if block.id != NULL_BLOCK and drops[block.id] > block.ref_count:
                raise ValueError(f"block {block.id} is freed more often than it is held")
        unhashed = []
        for block in blocks:
            if block.id == NULL_BLOCK:
                continue
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.hash is None and self.lifo_unhashed:
                    unhashed.append(block)
                else:
                    self.free_list.append(block)
        for block in reversed(unhashed):
            self.free_list.prepend(block)

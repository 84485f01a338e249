"""Puts unpublished blocks at the head one after the other, which turns their order round."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.course import solves
from minivllm.kv.block_pool import NULL_BLOCK, Block


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.free")
    def free(self, blocks: Iterable[Block]) -> None:
        ordered = [block for block in blocks if block.id != NULL_BLOCK]
        if any(ordered.count(block) > block.ref_count for block in ordered):
            raise ValueError("freed too often")
        for block in ordered:
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.hash is None and self.lifo_unhashed:
                    self.free_list.prepend(block)
                else:
                    self.free_list.append(block)

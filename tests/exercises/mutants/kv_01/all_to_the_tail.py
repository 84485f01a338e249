"""Unpublished blocks queue behind cached ones: each partial block pushes a useful one out (before vLLM #42656)."""

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
                self.free_list.append(block)

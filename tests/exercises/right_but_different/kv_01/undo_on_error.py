"""Works block by block and takes everything back when it fails, instead of checking first."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks
from minivllm.plan import EventKind


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.allocate")
    def allocate(self, n: int) -> list[Block]:
        taken: list[Block] = []
        try:
            while len(taken) < n:
                taken.append(self.free_list.pop_head())
        except OutOfBlocks:
            for block in taken[::-1]:
                self.free_list.prepend(block)
            raise
        for block in taken:
            self._hand_out(block)
        return taken

    def _hand_out(self, block: Block) -> None:
        if block.hash is not None:
            self.withdraw(block, EventKind.EVICTED)
        block.ref_count = 1

    @solves("minivllm.kv.block_pool:BlockPool.touch")
    def touch(self, blocks: Iterable[Block]) -> None:
        null = self.blocks[0]
        for block in blocks:
            if block is not null:
                block.ref_count += 1
                if block.ref_count == 1:
                    self.free_list.remove(block)

    @solves("minivllm.kv.block_pool:BlockPool.free")
    def free(self, blocks: Iterable[Block]) -> None:
        done: list[Block] = []
        for block in blocks:
            if block is self.blocks[0]:
                continue
            if block.ref_count < 1:
                for earlier in done:
                    earlier.ref_count += 1
                raise ValueError(f"nobody holds block {block.id}")
            block.ref_count -= 1
            done.append(block)
        idle = [block for block in dict.fromkeys(done) if block.ref_count == 0]
        for block in idle[::-1]:
            if self.lifo_unhashed and block.hash is None:
                self.free_list.prepend(block)
        for block in idle:
            if not (self.lifo_unhashed and block.hash is None):
                self.free_list.append(block)

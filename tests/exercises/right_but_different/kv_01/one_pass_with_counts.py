"""Counts with a Counter and builds lists; takes blocks by walking the free list; evicts first and links later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from minivllm.course import solves
from minivllm.kv.block_pool import NULL_BLOCK, Block, OutOfBlocks
from minivllm.plan import EventKind


def real(blocks: Iterable[Block]) -> list[Block]:
    return [block for block in blocks if block.id != NULL_BLOCK]


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.allocate")
    def allocate(self, n: int) -> list[Block]:
        head = list(islice(self.free_list, n))
        if len(head) < n:
            raise OutOfBlocks(f"only {len(head)} of {n} blocks are free")
        for block in head:
            if block.hash:
                self.withdraw(block, kind=EventKind.EVICTED)
        for block in reversed(head):
            self.free_list.remove(block)
            block.ref_count += 1
        return head

    @solves("minivllm.kv.block_pool:BlockPool.touch")
    def touch(self, blocks: Iterable[Block]) -> None:
        for block, times in Counter(real(blocks)).items():
            if not block.ref_count:
                self.free_list.remove(block)
            block.ref_count += times

    @solves("minivllm.kv.block_pool:BlockPool.free")
    def free(self, blocks: Iterable[Block]) -> None:
        order = real(blocks)
        drops = Counter(order)
        if bad := [block.id for block, times in drops.items() if times > block.ref_count]:
            raise ValueError(f"freed too often: {bad}")
        for block, times in drops.items():
            block.ref_count -= times
        idle = [block for block in drops if not block.ref_count]
        first = [block for block in idle if block.hash is None and self.lifo_unhashed]
        for block in idle:
            if block not in first:
                self.free_list.append(block)
        while first:
            self.free_list.prepend(first.pop())

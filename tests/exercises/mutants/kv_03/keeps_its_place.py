"""A block that is hit and freed again keeps the place it had: the order is that of first use, not of last use."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks


@solves("minivllm.kv.block_pool:FreeList")
class FreeList:
    def __init__(self) -> None:
        self._order: list[Block] = []
        self._present: set[Block] = set()

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Block]:
        return iter([block for block in self._order if block in self._present])

    def pop_head(self) -> Block:
        for block in self:
            self._present.remove(block)
            return block
        raise OutOfBlocks("empty")

    def remove(self, block: Block) -> None:
        if block not in self._present:
            raise ValueError(f"block {block.id} is not in the free list")
        self._present.remove(block)

    def append(self, block: Block) -> None:
        if block in self._present:
            raise ValueError(f"block {block.id} is in the free list already")
        self._present.add(block)
        if block not in self._order:
            self._order.append(block)

    def prepend(self, block: Block) -> None:
        if block in self._present:
            raise ValueError(f"block {block.id} is in the free list already")
        self._present.add(block)
        if block in self._order:
            self._order.remove(block)
        self._order.insert(0, block)

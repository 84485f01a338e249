"""A deque that is built anew without the block: right, and each hit costs as much as there are blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks


@solves("minivllm.kv.block_pool:FreeList")
class FreeList:
    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()
        self._present: set[Block] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self._blocks))

    def pop_head(self) -> Block:
        if not self._blocks:
            raise OutOfBlocks("empty")
        block = self._blocks.popleft()
        self._present.remove(block)
        return block

    def remove(self, block: Block) -> None:
        if block not in self._present:
            raise ValueError(f"block {block.id} is not in the free list")
        self._present.remove(block)
        self._blocks = deque(other for other in self._blocks if other is not block)

    def append(self, block: Block) -> None:
        if block in self._present:
            raise ValueError(f"block {block.id} is in the free list already")
        self._present.add(block)
        self._blocks.append(block)

    def prepend(self, block: Block) -> None:
        if block in self._present:
            raise ValueError(f"block {block.id} is in the free list already")
        self._present.add(block)
        self._blocks.appendleft(block)

"""A plain list: every hit looks through it and moves what follows (the first version of vLLM's evictor, fixed in vLLM #7193)."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks


@solves("minivllm.kv.block_pool:FreeList")
class FreeList:
    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self._blocks))

    def pop_head(self) -> Block:
        if not self._blocks:
            raise OutOfBlocks("empty")
        return self._blocks.pop(0)

    def remove(self, block: Block) -> None:
        self._blocks.remove(block)

    def append(self, block: Block) -> None:
        if block in self._blocks:
            raise ValueError(f"block {block.id} is in the free list already")
        self._blocks.append(block)

    def prepend(self, block: Block) -> None:
        if block in self._blocks:
            raise ValueError(f"block {block.id} is in the free list already")
        self._blocks.insert(0, block)

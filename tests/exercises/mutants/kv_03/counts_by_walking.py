"""len() walks the list: asked before every allocation, it makes each of them linear."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks


@solves("minivllm.kv.block_pool:FreeList")
class FreeList:
    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self._blocks))

    def __len__(self) -> int:
        return sum(1 for _ in self._blocks)

    def pop_head(self) -> Block:
        if not self._blocks:
            raise OutOfBlocks("empty")
        return self._blocks.popitem(last=False)[0]

    def remove(self, block: Block) -> None:
        if block not in self._blocks:
            raise ValueError(f"block {block.id} is not in the free list")
        del self._blocks[block]

    def append(self, block: Block) -> None:
        if block in self._blocks:
            raise ValueError(f"block {block.id} is in the free list already")
        self._blocks[block] = None

    def prepend(self, block: Block) -> None:
        self.append(block)
        self._blocks.move_to_end(block, last=False)

"""A heap of tickets with lazy deletion: a block's newest ticket counts, O(log n) on average."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks
from minivllm.plan import EventKind
from minivllm.request import Sequence


@solves("minivllm.kv.block_pool:FreeList")
class FreeList:
    def __init__(self) -> None:
        self._ticket: dict[Block, int] = {}
        self._heap: list[tuple[int, int, Block]] = []
        self._first, self._last = 0, 0

    def __len__(self) -> int:
        return len(self._ticket)

    def __iter__(self) -> Iterator[Block]:
        return iter(sorted(self._ticket, key=self._ticket.__getitem__))

    def pop_head(self) -> Block:
        while self._heap:
            number, _, block = heapq.heappop(self._heap)
            if self._ticket.get(block) == number:
                del self._ticket[block]
                return block
        raise OutOfBlocks("no block is free")

    def remove(self, block: Block) -> None:
        if block not in self._ticket:
            raise ValueError(f"block {block.id} is not free")
        del self._ticket[block]

    def append(self, block: Block) -> None:
        self._last += 1
        self._put(block, self._last)

    def prepend(self, block: Block) -> None:
        self._first -= 1
        self._put(block, self._first)

    def _put(self, block: Block, number: int) -> None:
        if block in self._ticket:
            raise ValueError(f"block {block.id} is free already")
        self._ticket[block] = number
        heapq.heappush(self._heap, (number, block.id, block))


class KVCacheManager:
    @solves("minivllm.kv.manager:KVCacheManager.free")
    def free(self, sequence: Sequence) -> None:
        table = self.tables.pop(sequence.uid, None)
        if table is not None and table.blocks:
            order = list(reversed(table.blocks)) if self.leaf_first else list(table.blocks)
            self._emit(
                EventKind.FREED,
                request=sequence.request.id,
                sequence=sequence.index,
                blocks=tuple(block.id for block in order),
            )
            for block in order:
                self.pool.free([block])

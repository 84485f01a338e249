"""An OrderedDict does it all: constant cost at both ends and in the middle. Blocks are freed through an iterator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks
from minivllm.plan import EventKind
from minivllm.request import Sequence


@solves("minivllm.kv.block_pool:FreeList")
class FreeList:
    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def pop_head(self) -> Block:
        try:
            return self._blocks.popitem(last=False)[0]
        except KeyError:
            raise OutOfBlocks("no block is free") from None

    def remove(self, block: Block) -> None:
        if self._blocks.pop(block, None) is None:
            raise ValueError(f"{block} is not free")

    def append(self, block: Block) -> None:
        if self._blocks.setdefault(block, False):
            raise ValueError(f"{block} is free already")
        self._blocks[block] = True

    def prepend(self, block: Block) -> None:
        self.append(block)
        self._blocks.move_to_end(block, last=False)


class KVCacheManager:
    @solves("minivllm.kv.manager:KVCacheManager.free")
    def free(self, sequence: Sequence) -> None:
        if sequence.uid not in self.tables:
            return
        blocks = self.tables[sequence.uid].blocks
        del self.tables[sequence.uid]
        if self.leaf_first:
            blocks.reverse()
        self.pool.free(iter(blocks))
        if blocks:
            ids = tuple(block.id for block in blocks)
            self._emit(EventKind.FREED, request=sequence.request.id, sequence=sequence.index, blocks=ids)

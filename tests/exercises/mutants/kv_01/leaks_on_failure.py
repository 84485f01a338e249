"""Takes blocks one by one and notices too late that there are not enough: those it has are lost."""

from __future__ import annotations

from minivllm.course import solves
from minivllm.kv.block_pool import Block
from minivllm.plan import EventKind


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.allocate")
    def allocate(self, n: int) -> list[Block]:
        taken = []
        for _ in range(n):
            block = self.free_list.pop_head()
            if block.hash is not None:
                self.withdraw(block, EventKind.EVICTED)
            block.ref_count = 1
            taken.append(block)
        return taken

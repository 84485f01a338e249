"""Takes the most recently freed blocks: every eviction hits what will be asked for next."""

from __future__ import annotations

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks
from minivllm.plan import EventKind


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.allocate")
    def allocate(self, n: int) -> list[Block]:
        if n > self.num_free:
            raise OutOfBlocks(f"{n} of {self.num_free}")
        taken = list(self.free_list)[::-1][:n]
        for block in taken:
            self.free_list.remove(block)
            if block.hash is not None:
                self.withdraw(block, EventKind.EVICTED)
            block.ref_count = 1
        return taken

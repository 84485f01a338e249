"""Evicting one block forgets all that share its hash, a second copy with the same content too."""

from __future__ import annotations

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks
from minivllm.plan import EventKind


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.allocate")
    def allocate(self, n: int) -> list[Block]:
        if n > self.num_free:
            raise OutOfBlocks(f"{n} of {self.num_free}")
        taken = [self.free_list.pop_head() for _ in range(n)]
        for block in taken:
            if block.hash is not None:
                for copy in list(self.published[block.hash].values()):
                    self.withdraw(copy, EventKind.EVICTED)
            block.ref_count = 1
        return taken

"""Hands out a block that is still published: the next hit on its old hash reads another request's tokens (nano-vllm #163)."""

from __future__ import annotations

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks


class BlockPool:
    @solves("minivllm.kv.block_pool:BlockPool.allocate")
    def allocate(self, n: int) -> list[Block]:
        if n > self.num_free:
            raise OutOfBlocks(f"{n} of {self.num_free}")
        taken = [self.free_list.pop_head() for _ in range(n)]
        for block in taken:
            block.ref_count = 1
        return taken

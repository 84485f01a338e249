"""A sequence's block table: which physical block holds which of its tokens. Forking shares, writing copies."""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.kv.block_pool import Block, BlockPool


@dataclass(slots=True)
class BlockTable:
    """Blocks in token order: position p lives in `blocks[p // block_size]`. Only the last one may be partly full.

    `num_published` counts the leading blocks that were offered to the prefix index already.
    """

    blocks: list[Block] = field(default_factory=list)
    num_published: int = 0

    @property
    def ids(self) -> list[int]:
        """Physical block ids, for the runner."""
        return [block.id for block in self.blocks]

    def fork(self, pool: BlockPool) -> BlockTable:
        """A second table over the same blocks: one more reference each, nothing copied."""
        pool.touch(self.blocks)
        return BlockTable(list(self.blocks), self.num_published)

    def needs_copy(self, index: int, retained: int = 0) -> bool:
        """The write barrier: whether writing into block `index` would change what somebody else may read.

        True for a block with other holders, and for a published one even with a single holder: its hash promises content.
        `retained` of its references belong to copies in flight and don't count: a copy reads before the step writes.
        """
        block = self.blocks[index]
        return block.ref_count - retained > 1 or block.hash is not None

    def copy_on_write(self, index: int, fresh: Block, pool: BlockPool) -> tuple[int, int]:
        """Put `fresh` (allocated, one reference) in place of block `index`; returns the copy to run: (source, destination)."""
        shared = self.blocks[index]
        self.blocks[index] = fresh
        pool.free([shared])
        return shared.id, fresh.id

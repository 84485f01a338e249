"""kv-01 · The block pool: allocate, share, free · chapter 3 · about 20 minutes · 20 points

Replace each `raise NotImplementedError`. Signature and docstring are the contract; everything that they allow is right.
Add helpers and imports as you like; keep the names and the @solves marks.

    4  allocate takes from the head of the free list, or nothing at all
    3  an allocated block can no longer be hit
    4  a shared block stays until its last holder frees it
    3  freeing more often than held is an error that changes nothing
    3  freed blocks queue in the order that the cache wants
    3  after any calls every block is in exactly one place

Grade it:  python -m minivllm.course.grade kv-01          (--hint for a hint)
Run it:    python -m minivllm.course.run --with exercises/kv_01_block_pool.py "What is the capital of France?"
"""
# cut from the engine: a7a8c482ec915438

from __future__ import annotations

from collections.abc import Iterable

from minivllm.course import solves
from minivllm.kv.block_pool import NULL_BLOCK, Block, OutOfBlocks
from minivllm.plan import EventKind


class BlockPool:
    """`num_blocks` physical blocks, of which one is the null block and the rest are usable.

    With `caching` off no block is ever published. `lifo_unhashed` puts freed blocks that carry no hash at the head of
    the free list (re-used at once: they can never be hit), as the leading engine does since 2026; off, they queue at the tail.

    `blocks[i]` is the `Block` with `id` i; a block also has `ref_count` (how many hold it) and `hash` (what it is published
    under, or None). `free_list` holds the free ones, next to be handed out first: iterating goes from the head to the
    tail, `len` counts, `pop_head()` takes the head, `remove(block)` takes a block from anywhere (`ValueError` if it is
    not there), `append(block)` puts one at the tail, `prepend(block)` at the head. `published[hash]` is a dict from id
    to block: equal content may be there several times.
    """

    # The rest of this class is the engine's, in minivllm/kv/block_pool.py; your methods join it there. It has blocks,
    # caching, lifo_unhashed, free_list, published, num_usable, num_free; publish(block: Block, block_hash: bytes),
    # withdraw(block: Block, kind: EventKind=EventKind.WITHDRAWN), find(block_hash: bytes), reset_prefix_cache(),
    # integrity().

    @solves("minivllm.kv.block_pool:BlockPool.allocate")
    def allocate(self, n: int) -> list[Block]:
        """Take `n` blocks from the head of the free list, each with one reference and no hash.

        All or nothing: raises `OutOfBlocks(message)`, with nothing changed, if fewer than `n` are free. A block that
        still has a hash is evicted, so that nobody can hit content that is about to be overwritten:
        `self.withdraw(block, EventKind.EVICTED)` takes its hash out of the index and emits the EVICTED event, one a block.
        """
        raise NotImplementedError("kv-01: BlockPool.allocate")

    @solves("minivllm.kv.block_pool:BlockPool.touch")
    def touch(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each block; one that was free leaves the free list, wherever in it it stood.

        A published block stays published. The null block (its id is `NULL_BLOCK`) is passed over, here and in `free`.
        """
        raise NotImplementedError("kv-01: BlockPool.touch")

    @solves("minivllm.kv.block_pool:BlockPool.free")
    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference from each block, in the order given; those without a holder return to the free list.

        Those with a hash go to the tail one after the other: of them the first given is evicted first. Those without go
        to the head as a group that keeps the order given: the first given is handed out next; with `lifo_unhashed` off
        they go to the tail like the others. A block may be given several times. Raises `ValueError`, with nothing
        changed, when a block would lose more references than it has.
        """
        raise NotImplementedError("kv-01: BlockPool.free")

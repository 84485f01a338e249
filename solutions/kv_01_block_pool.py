"""kv-01 · The block pool: allocate, share, free: the engine's own answer, cut from it. Do not edit.

Why like this.

* `allocate` asks for the number first and takes then: a caller that gets `OutOfBlocks` can wait or preempt and try again, because
  nothing has happened. Taking one by one would need an undo.
* A hash is dropped when its block is *taken*, not when it is freed. So every free block is a cache entry until the memory is
  needed, and "free" costs nothing.
* `touch` takes a free block out of the list wherever it stands, which is why the list must be able to do that at constant cost.
* `free` checks all references before it changes one. A double free is a bug in the caller; half of it done would hide where.
* Blocks without a hash can never be hit: using them again first spares the cached ones one eviction each.
"""

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
        if n > self.num_free:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free} of {self.num_usable} are free")
        taken = [self.free_list.pop_head() for _ in range(n)]
        for block in taken:
            if block.hash is not None:
                self.withdraw(block, EventKind.EVICTED)
            block.ref_count = 1
        return taken

    @solves("minivllm.kv.block_pool:BlockPool.touch")
    def touch(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each block; one that was free leaves the free list, wherever in it it stood.

        A published block stays published. The null block (its id is `NULL_BLOCK`) is passed over, here and in `free`.
        """
        for block in blocks:
            if block.id == NULL_BLOCK:
                continue
            if block.ref_count == 0:
                self.free_list.remove(block)
            block.ref_count += 1

    @solves("minivllm.kv.block_pool:BlockPool.free")
    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference from each block, in the order given; those without a holder return to the free list.

        Those with a hash go to the tail one after the other: of them the first given is evicted first. Those without go
        to the head as a group that keeps the order given: the first given is handed out next; with `lifo_unhashed` off
        they go to the tail like the others. A block may be given several times. Raises `ValueError`, with nothing
        changed, when a block would lose more references than it has.
        """
        ordered = [block for block in blocks if block.id != NULL_BLOCK]
        self._check_references(ordered)
        unhashed = []
        for block in ordered:
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.hash is None and self.lifo_unhashed:
                    unhashed.append(block)
                else:
                    self.free_list.append(block)
        for block in reversed(unhashed):
            self.free_list.prepend(block)

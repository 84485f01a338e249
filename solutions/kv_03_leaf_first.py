"""kv-03 · Evict leaves first: the engine's own answer, cut from it. Do not edit.

Why like this.

* A block is hit from the root on, so evicting a block strands all that hang on it. The set of cached blocks must stay closed
  under "the block before": leaves go first.
* Least recently used does that if two things hold: a hit uses the whole path (it does: `touch` gets all of it), and blocks of
  equal age leave in the order last to first. Freeing a sequence's blocks in reverse is all it takes.
* A hit takes blocks out of the middle of the queue. A linked list does so by changing two neighbours; with the links in the blocks
  no lookup is needed either. One sentinel in place of head and tail leaves no special case.
"""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks
from minivllm.kv.manager import _ids
from minivllm.plan import EventKind
from minivllm.request import Sequence


@solves("minivllm.kv.block_pool:FreeList")
class FreeList:
    """The free blocks in a queue whose head is handed out next. Every operation is O(1), also in the middle.

    A block is in it at most once; iterating goes from the head to the tail, and `len` counts. A call that raises changes
    nothing. `OutOfBlocks` takes a message, as `ValueError` does. Blocks can be keys of a dict.

    The engine's is a doubly linked list threaded through the blocks' own `prev` and `next`, which belong to the list
    and are None in a new block; `Block(id)` makes one. Any other structure of that cost is as good.
    Source: vLLM 0.32 `v1/core/kv_cache_utils.py:FreeKVCacheBlockQueue`.
    """

    def __init__(self) -> None:
        self._ends = Block(-1)  # a sentinel: its `next` is the head, its `prev` the tail
        self._ends.prev = self._ends.next = self._ends
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.next
        while block is not None and block is not self._ends:
            yield block
            block = block.next

    def pop_head(self) -> Block:
        """Remove and return the head; `OutOfBlocks` if the list is empty."""
        head = self._ends.next
        if head is None or head is self._ends:
            raise OutOfBlocks("the free list is empty")
        self.remove(head)
        return head

    def remove(self, block: Block) -> None:
        """Unlink a block from wherever it is; `ValueError` if it is not in the list."""
        if block.prev is None or block.next is None:
            raise ValueError(f"block {block.id} is not in the free list")
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._size -= 1

    def append(self, block: Block) -> None:
        """Put a block at the tail: handed out last. `ValueError` if it is in the list already."""
        self._insert(block, before=self._ends)

    def prepend(self, block: Block) -> None:
        """Put a block at the head: handed out next. `ValueError` if it is in the list already."""
        assert self._ends.next is not None
        self._insert(block, before=self._ends.next)

    def _insert(self, block: Block, before: Block) -> None:
        if block.prev is not None:
            raise ValueError(f"block {block.id} is in the free list already")
        assert before.prev is not None
        block.prev, block.next = before.prev, before
        before.prev.next = before.prev = block
        self._size += 1


class KVCacheManager:
    """Block tables of all live sequences over one pool.

    `tables` maps a sequence's `uid` to its `BlockTable`, whose `blocks` are a list of `Block` in token order;
    `pool.free(blocks)` drops a reference from each, in the order given.
    """

    # The rest of this class is the engine's, in minivllm/kv/manager.py; your methods join it there. It has
    # block_size, publish_at, leaf_first, pool, watermark_blocks, tables, retained, partial, stats, tag, _emit;
    # lookup(sequence: Sequence, num_tokens: int), lookup_partial(sequence: Sequence, hits: Seq[Block], num_tokens:
    # int), record_written(sequence: Sequence, start: int, stop: int), reset_prefix_cache(), hashes(sequence:
    # Sequence), record_lookup(sequence: Sequence, num_hit: int), reads_cache(sequence: Sequence),
    # blocks_for(num_tokens: int), blocks_of_request(request: Request, num_tokens: Seq[int]), fits_whole(request:
    # Request, hits: Seq[Block], *, watermark: bool), allocate(sequence: Sequence, num_new: int, hits: Seq[Block]=(),
    # partial: PartialHit | None=None, *, watermark: bool=False), num_cached(hits: Seq[Block], partial: PartialHit |
    # None), tail_to_copy(table: BlockTable, computed: int), release(copies: Iterable[tuple[int, int]]),
    # publish(sequence: Sequence, num_tokens: int), withdraw(sequence: Sequence), fork(parent: Sequence, child:
    # Sequence), block_ids(sequence: Sequence), add_tables(rows: Seq[Row]), num_held(request: Request), integrity(),
    # all_tables().

    @solves("minivllm.kv.manager:KVCacheManager.free")
    def free(self, sequence: Sequence) -> None:
        """Take a sequence's table out of `tables` and give up its references; nothing happens if it has none.

        With `leaf_first` (a bool) the last block goes first, so that a prefix outlives what hangs on it: a cached block
        without the blocks before it can never be hit. Off, the first goes first. A table that had blocks is reported by
        one event, with a tuple of their ids in the order given up; one without blocks by none:
        `self._emit(EventKind.FREED, request=sequence.request.id, sequence=sequence.index, blocks=tuple(ids))`.
        """
        table = self.tables.pop(sequence.uid, None)
        if table is None:
            return
        blocks = table.blocks[::-1] if self.leaf_first else table.blocks
        self.pool.free(blocks)
        if blocks:
            self._emit(EventKind.FREED, request=sequence.request.id, sequence=sequence.index, blocks=_ids(blocks))

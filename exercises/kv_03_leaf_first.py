"""kv-03 · Evict leaves first · chapter 6 · about 25 minutes · 25 points

Replace each `raise NotImplementedError`. Signature and docstring are the contract; everything that they allow is right.
Add helpers and imports as you like; keep the names and the @solves marks.

    4  blocks leave in the order they came, head first
    4  a block can be taken from anywhere, once
    5  no operation looks at all the blocks
    5  a sequence gives up its blocks last one first
    4  every cached block can still be hit, whatever was evicted
    3  for any calls the list is the one that a plain Python list gives

Grade it:  python -m minivllm.course.grade kv-03          (--hint for a hint)
Run it:    python -m minivllm.course.run --with exercises/kv_03_leaf_first.py "What is the capital of France?"
"""
# cut from the engine: 048410ccceb13ab5

from __future__ import annotations

from collections.abc import Iterator

from minivllm.course import solves
from minivllm.kv.block_pool import Block, OutOfBlocks
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
        raise NotImplementedError("kv-03: FreeList.__init__")

    def __len__(self) -> int:
        raise NotImplementedError("kv-03: FreeList.__len__")

    def __iter__(self) -> Iterator[Block]:
        raise NotImplementedError("kv-03: FreeList.__iter__")

    def pop_head(self) -> Block:
        """Remove and return the head; `OutOfBlocks` if the list is empty."""
        raise NotImplementedError("kv-03: FreeList.pop_head")

    def remove(self, block: Block) -> None:
        """Unlink a block from wherever it is; `ValueError` if it is not in the list."""
        raise NotImplementedError("kv-03: FreeList.remove")

    def append(self, block: Block) -> None:
        """Put a block at the tail: handed out last. `ValueError` if it is in the list already."""
        raise NotImplementedError("kv-03: FreeList.append")

    def prepend(self, block: Block) -> None:
        """Put a block at the head: handed out next. `ValueError` if it is in the list already."""
        raise NotImplementedError("kv-03: FreeList.prepend")


class KVCacheManager:
    """Block tables of all live sequences over one pool.

    `tables` maps a sequence's `uid` to its `BlockTable`, whose `blocks` are a list of `Block` in token order;
    `pool.free(blocks)` drops a reference from each, in the order given.
    """

    # The rest of this class is the engine's, in minivllm/kv/manager.py; your methods join it there. It has
    # block_size, publish_at, leaf_first, pool, watermark_blocks, tables, retained, partial, stats, tag, _emit;
    # lookup(sequence: Sequence, num_tokens: int), lookup_partial(sequence: Sequence, hits: Seq[Block], num_tokens:
    # int), record_written(sequence: Sequence, start: int, stop: int), reset_prefix_cache(), hashes(sequence:
    # Sequence), record_lookup(sequence: Sequence, num_hit: int), blocks_for(num_tokens: int),
    # blocks_of_request(request: Request, num_tokens: Seq[int]), fits_whole(request: Request, hits: Seq[Block], *,
    # watermark: bool), allocate(sequence: Sequence, num_new: int, hits: Seq[Block]=(), partial: PartialHit |
    # None=None, *, watermark: bool=False), num_cached(hits: Seq[Block], partial: PartialHit | None),
    # tail_to_copy(table: BlockTable, computed: int), release(copies: Iterable[tuple[int, int]]), publish(sequence:
    # Sequence, num_tokens: int), withdraw(sequence: Sequence), fork(parent: Sequence, child: Sequence),
    # block_ids(sequence: Sequence), add_tables(rows: Seq[Row]), num_held(request: Request), integrity(),
    # all_tables().

    @solves("minivllm.kv.manager:KVCacheManager.free")
    def free(self, sequence: Sequence) -> None:
        """Take a sequence's table out of `tables` and give up its references; nothing happens if it has none.

        With `leaf_first` (a bool) the last block goes first, so that a prefix outlives what hangs on it: a cached block
        without the blocks before it can never be hit. Off, the first goes first. A table that had blocks is reported by
        one event, with a tuple of their ids in the order given up; one without blocks by none:
        `self._emit(EventKind.FREED, request=sequence.request.id, sequence=sequence.index, blocks=tuple(ids))`.
        """
        raise NotImplementedError("kv-03: KVCacheManager.free")

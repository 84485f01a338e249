"""The pool of KV blocks: reference counts, the free list that is also the LRU, and the index of published hashes.

A block is in exactly one of three places: it is the null block, or somebody holds it (`ref_count > 0`), or it is in the
free list. A free block may still carry a hash: then it is allocatable *and* hittable at once, and "free" never means
"empty". Allocation takes from the head of the list and drops the hash it finds there; that is all eviction is.

The leading engine (vLLM 0.32, `v1/core/block_pool.py:BlockPool`) keeps the same three places and the same order; left
out here are several hashes per block, KV events over a socket, and sampled block-lifetime metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from minivllm.config import ConfigError, MinivllmError
from minivllm.plan import Emit, EventKind, ignore_events

NULL_BLOCK = 0
"""Id of the block that stands for "no block": never allocated, never freed, never published."""


class OutOfBlocks(MinivllmError):
    """More blocks were asked for than are free. Nothing was changed."""


@dataclass(slots=True, eq=False)
class Block:
    """One physical block of `block_size` token slots in every layer. The links are set only while it is free.

    `ref_count` is how many hold it; `hash` is what it is published under, or None. Blocks are equal only to themselves.
    """

    id: int
    ref_count: int = 0
    hash: bytes | None = None
    prev: Block | None = None
    next: Block | None = None


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

    def __init__(
        self, num_blocks: int, *, caching: bool = True, lifo_unhashed: bool = True, emit: Emit = ignore_events
    ) -> None:
        if num_blocks < 2:
            raise ConfigError("num_kv_blocks", num_blocks, "must be at least 2: one is the null block")
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.caching = caching
        self.lifo_unhashed = lifo_unhashed
        self.free_list = FreeList()
        for block in self.blocks[1:]:
            self.free_list.append(block)
        self.published: dict[bytes, dict[int, Block]] = {}
        self._emit = emit

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        return len(self.free_list)

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

    def _check_references(self, blocks: list[Block]) -> None:
        drops: dict[int, int] = {}
        for block in blocks:
            drops[block.id] = drops.get(block.id, 0) + 1
            if drops[block.id] > block.ref_count:
                raise ValueError(f"block {block.id} is freed more often than it is held")

    def publish(self, block: Block, block_hash: bytes) -> None:
        """Make a full block findable under the hash of its whole prefix. Content that is published already gets a
        second copy in the index: block tables are append-only, so duplicates are tolerated, never merged."""
        if not self.caching or block.id == NULL_BLOCK:
            return
        if block.hash is not None:
            raise ValueError(f"block {block.id} is published already")
        block.hash = block_hash
        self.published.setdefault(block_hash, {})[block.id] = block
        self._emit(EventKind.PUBLISHED, blocks=(block.id,))

    def withdraw(self, block: Block, kind: EventKind = EventKind.WITHDRAWN) -> None:
        """Take a block's hash out of the index; its holders keep it."""
        assert block.hash is not None
        copies = self.published[block.hash]
        del copies[block.id]
        if not copies:
            del self.published[block.hash]
        block.hash = None
        self._emit(kind, blocks=(block.id,))

    def find(self, block_hash: bytes) -> Block | None:
        """The block published first under this hash, or None. Takes no reference."""
        copies = self.published.get(block_hash)
        return next(iter(copies.values())) if copies else None

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; refused (False) while anybody holds a block."""
        if self.num_free != self.num_usable:
            return False
        for block in self.blocks:
            if block.hash is not None:
                self.withdraw(block, EventKind.EVICTED)
        return True

    def integrity(self) -> None:
        """Raise `AssertionError` unless every block is in exactly one place and the index and the hashes agree."""
        free = list(self.free_list)
        free_ids = {block.id for block in free}
        assert len(free) == len(free_ids) == self.num_free, "the free list holds a block twice or lost count"
        assert NULL_BLOCK not in free_ids, "the null block is free to take"
        assert self.blocks[NULL_BLOCK].hash is None, "the null block is published"
        for block in self.blocks[1:]:
            assert block.ref_count >= 0, f"block {block.id} has {block.ref_count} references"
            assert (block.ref_count == 0) == (block.id in free_ids), f"block {block.id} is lost or free while held"
        hashed = {(block.hash, block.id) for block in self.blocks if block.hash is not None}
        indexed = {(key, id) for key, copies in self.published.items() for id in copies}
        assert hashed == indexed, "the index and the blocks' hashes disagree"
        assert all(self.published.values()), "the index keeps a hash without a block"

"""The KV cache manager: which sequence holds which blocks, and the order of operations that keeps sharing safe.

Source of the order: vLLM 0.32 `v1/core/kv_cache_manager.py:KVCacheManager.allocate_slots`. Left out: draft
tokens. Elsewhere: sliding windows in `hybrid.py`, which runs one such manager for each group of layers; host memory in
`offload.py`. Added: forks, with copy on write (`allocate` returns the copies to run before the forward).

Both ends of a copy get one more reference until the step that runs it has completed (`retain`, `release`): whatever
happens meanwhile (an abort while the forward runs, the next step planned ahead of time), neither block goes to somebody
else under the copy's hands. vLLM has the same for its only copies, those of prefix hits that end inside a block
(`v1/core/single_type_kv_cache_manager.py:_apply_cow`); it never forks a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from minivllm.config import EngineConfig
from minivllm.kv.block_pool import NULL_BLOCK, Block, BlockPool
from minivllm.kv.block_table import BlockTable
from minivllm.kv.partial import PartialHit, PartialIndex
from minivllm.kv.prefix import ROOT_HASH, extend_hashes, longest_hit
from minivllm.plan import Emit, EventKind, Row, ignore_events
from minivllm.request import Request, Sequence


@dataclass(slots=True)
class CacheStats:
    """Prefix-cache tokens asked for and found, counted at admission."""

    queries: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


class KVCacheManager:
    """Block tables of all live sequences over one pool.

    `tables` maps a sequence's `uid` to its `BlockTable`, whose `blocks` are a list of `Block` in token order;
    `pool.free(blocks)` drops a reference from each, in the order given.
    """

    def __init__(
        self, config: EngineConfig, num_blocks: int, emit: Emit = ignore_events, *, pool: BlockPool | None = None
    ) -> None:
        self.block_size = config.block_size
        self.publish_at = config.publish_at
        self.leaf_first = config.free_order == "leaf_first"
        self.pool = pool or BlockPool(
            num_blocks, caching=config.enable_prefix_caching, lifo_unhashed=config.lifo_unhashed, emit=emit
        )
        self.watermark_blocks = int(config.watermark * self.pool.num_usable)
        self.tables: dict[int, BlockTable] = {}
        self.retained: Counter[int] = Counter()
        self.partial = PartialIndex() if config.partial_block_hits else None
        self.stats = CacheStats()
        self.tag = b""
        self._emit = emit

    # lookup and admission

    def lookup(self, sequence: Sequence, num_tokens: int) -> list[Block]:
        """Cached blocks that the first `num_tokens` tokens of a sequence can start from. No side effects.

        None when caching is off, or when the request wants logprobs of its prompt: those need every position computed.
        """
        if not self.reads_cache(sequence):
            return []
        return longest_hit(self.hashes(sequence), num_tokens, self.block_size, self.pool)

    def lookup_partial(self, sequence: Sequence, hits: Seq[Block], num_tokens: int) -> PartialHit | None:
        """A block to copy the tokens after `hits` from, all but the last of `num_tokens` at most. No side effects.

        The block stays alive beside the request's own ones until it is copied: None if there is no room for that too.
        """
        if self.partial is None or not self.reads_cache(sequence):
            return None
        start = len(hits) * self.block_size
        rest = sequence.tokens(start, min(start + self.block_size, num_tokens - 1))
        found = self.partial.find(self._parent(sequence, len(hits)), rest)
        if found is None or not self._fits_beside(sequence.request, [*hits, self.pool.blocks[found.block_id]]):
            return None
        return found

    def _fits_beside(self, request: Request, sources: Seq[Block]) -> bool:
        """Whether a request fits whole if the last of `sources` is copied and not shared."""
        total = self.blocks_of_request(request, [max(s.num_tokens, 1) for s in request.live])
        return total - (len(sources) - 1) + num_idle(sources) <= self.pool.num_free

    def _parent(self, sequence: Sequence, index: int) -> tuple[bytes, str]:
        """What block `index` of a sequence hangs on."""
        return self.hashes(sequence)[index - 1] if index else ROOT_HASH, sequence.request.cache_salt

    def record_written(self, sequence: Sequence, start: int, stop: int) -> None:
        """The KV of positions start .. stop - 1 is there now: others may hit its blocks before they are full."""
        if self.partial is None:
            return
        for i in range(start // self.block_size, self.blocks_for(stop)):
            tokens = sequence.tokens(i * self.block_size, min((i + 1) * self.block_size, stop))
            self.partial.record(self.tables[sequence.uid].blocks[i].id, self._parent(sequence, i), tokens)

    def reset_prefix_cache(self) -> bool:
        """Forget everything that could be hit; refused (False) while anybody holds a block."""
        if self.partial is not None and self.pool.num_free == self.pool.num_usable:
            self.partial.clear()
        return self.pool.reset_prefix_cache()

    def hashes(self, sequence: Sequence) -> list[bytes]:
        """The sequence's block hashes, brought up to date with its tokens."""
        if sequence.num_tokens // self.block_size > len(sequence.block_hashes):
            tokens = sequence.tokens(0, sequence.num_tokens)
            extend_hashes(sequence.block_hashes, tokens, self.block_size, sequence.request.cache_salt)
        return sequence.block_hashes

    def record_lookup(self, sequence: Sequence, num_hit: int) -> None:
        """Count an admission in the hit statistics, unless it could not read the cache."""
        if self.reads_cache(sequence):
            self.stats.queries += sequence.num_tokens
            self.stats.hits += num_hit

    def reads_cache(self, sequence: Sequence) -> bool:
        """Whether a sequence may start from cached KV: not if logprobs of its prompt are wanted, which need every position."""
        return self.pool.caching and sequence.request.params.prompt_logprobs is None

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens: the quotient rounded up."""
        return -(-num_tokens // self.block_size)

    def blocks_of_request(self, request: Request, num_tokens: Seq[int]) -> int:
        """Blocks that a request holds when its live sequences have `num_tokens` tokens each, sharing the full prompt blocks."""
        shared = len(request.prompt_token_ids) // self.block_size if len(num_tokens) > 1 else 0
        return shared + sum(self.blocks_for(n) - shared for n in num_tokens)

    def fits_whole(self, request: Request, hits: Seq[Block], *, watermark: bool) -> bool:
        """Whether every known token of a request fits now: the admission gate (vLLM: `scheduler_reserve_full_isl`).

        Hit blocks that nobody holds are in the free list and leave it when touched, so they count as needed.
        """
        needed = self.blocks_of_request(request, [max(s.num_tokens, 1) for s in request.live])
        needed -= sum(block.ref_count > 0 for block in hits)
        return needed + (self.watermark_blocks if watermark else 0) <= self.pool.num_free

    # allocation

    def allocate(
        self,
        sequence: Sequence,
        num_new: int,
        hits: Seq[Block] = (),
        partial: PartialHit | None = None,
        *,
        watermark: bool = False,
    ) -> list[tuple[int, int]] | None:
        """Make room for `num_new` tokens after those computed; `hits` and `partial` only for a sequence without blocks.

        Returns the block copies to run before the forward (usually none; `release` them when it is done), or None if the
        blocks don't suffice: then nothing has changed. In this order: count what is needed, idle hits included; give up
        or touch the hits; allocate; copy a tail that may not be written, or the block that a partial hit ends in; publish
        the blocks that this step fills.
        """
        table = self.tables.get(sequence.uid, BlockTable())
        found = [*hits, self.pool.blocks[partial.block_id]] if partial else hits
        computed = sequence.num_computed + self.num_cached(hits, partial)
        growth = self.blocks_for(computed + num_new) - len(table.blocks) - len(hits)
        tail = self.tail_to_copy(table, computed)
        needed = max(growth, 0) + (tail is not None)
        if needed + num_idle(found) + (self.watermark_blocks if watermark else 0) > self.pool.num_free:
            return None
        self.pool.touch(found)
        fresh = self._take(needed)
        copies = [table.copy_on_write(tail, fresh.pop(), self.pool)] if tail is not None else []
        copies += [(partial.block_id, fresh[0].id)] if partial else []
        table.blocks += [*hits, *fresh]
        table.num_published += len(hits)
        self.tables[sequence.uid] = table
        self._retain(copies)
        self.pool.free(found[len(hits) :])  # retained now
        self._report(sequence, found, computed, fresh, copies)
        if self.publish_at == "schedule":
            self.publish(sequence, computed + num_new)
        return copies

    def num_cached(self, hits: Seq[Block], partial: PartialHit | None) -> int:
        """How many tokens need not be computed."""
        return len(hits) * self.block_size + (partial.num_tokens if partial else 0)

    def _take(self, n: int) -> list[Block]:
        fresh = self.pool.allocate(n)
        if self.partial is not None:
            self.partial.forget(_ids(fresh))
        return fresh

    def tail_to_copy(self, table: BlockTable, computed: int) -> int | None:
        """Index of the partly full block that the next token goes into, if it may not be written in place."""
        index, offset = divmod(computed, self.block_size)
        if not offset or index >= len(table.blocks):
            return None
        return index if table.needs_copy(index, self.retained[table.blocks[index].id]) else None

    def _retain(self, copies: Seq[tuple[int, int]]) -> None:
        """Keep both ends of copies alive until `release`."""
        ends = [block_id for pair in copies for block_id in pair]
        self.pool.touch(self.pool.blocks[block_id] for block_id in ends)
        self.retained.update(ends)

    def release(self, copies: Iterable[tuple[int, int]]) -> None:
        """The step that runs these copies has completed, or won't run them: each of their ends loses one reference."""
        ends = [block_id for pair in copies for block_id in pair]
        self.pool.free(self.pool.blocks[block_id] for block_id in ends)
        self.retained -= Counter(ends)

    def _report(
        self, sequence: Sequence, hits: Seq[Block], computed: int, fresh: Seq[Block], copies: Seq[tuple[int, int]]
    ) -> None:
        who = {"request": sequence.request.id, "sequence": sequence.index}
        if hits:
            self._emit(EventKind.HIT, **who, blocks=_ids(hits), tokens=computed)
        if fresh:
            self._emit(EventKind.ALLOCATED, **who, blocks=_ids(fresh))
        for pair in copies:
            self._emit(EventKind.COPIED, **who, blocks=pair)

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Publish the sequence's full blocks below `num_tokens` that were not offered yet."""
        table = self.tables[sequence.uid]
        full = min(num_tokens, sequence.num_tokens) // self.block_size
        if not self.pool.caching or full <= table.num_published:
            return
        hashes = self.hashes(sequence)
        for i in range(table.num_published, full):
            if table.blocks[i].hash is None:  # a forked sibling may have published the block they share
                self.pool.publish(table.blocks[i], hashes[i] + self.tag)
        table.num_published = full

    def withdraw(self, sequence: Sequence) -> None:
        """Take back the hashes of blocks whose KV will not be written after all: the sequence leaves the step it was planned in."""
        table = self.tables[sequence.uid]
        written = sequence.num_computed // self.block_size
        for block in table.blocks[written : table.num_published]:
            if block.hash is not None:
                self.pool.withdraw(block)
        table.num_published = min(table.num_published, written)

    # sharing and release

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`, and start from what the parent has computed."""
        self.tables[child.uid] = self.tables[parent.uid].fork(self.pool)
        child.num_computed = parent.num_computed
        child.block_hashes[:] = parent.block_hashes[: child.num_computed // self.block_size]
        self._emit(
            EventKind.FORKED,
            request=child.request.id,
            sequence=child.index,
            blocks=tuple(self.block_ids(child)),
            parent=parent.index,
        )

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

    def block_ids(self, sequence: Sequence) -> list[int]:
        """Physical block ids of a sequence's table, in token order."""
        return self.tables[sequence.uid].ids

    def add_tables(self, rows: Seq[Row]) -> None:
        """Give the rows of a plan the tables of further layer groups: there are none."""

    def num_held(self, request: Request) -> tuple[int, int]:
        """Physical blocks that a request's sequences hold together, and what they would hold if they shared none."""
        ids = [block_id for s in request.live if s.uid in self.tables for block_id in self.block_ids(s)]
        return len(set(ids)), len(ids)

    def integrity(self) -> None:
        """Raise `AssertionError` unless every reference in the pool is accounted for by a table or a copy in flight."""
        self.pool.integrity()
        held = Counter(block.id for table in self.all_tables() for block in table.blocks)
        for block in self.pool.blocks[1:]:
            assert block.ref_count == held[block.id] + self.retained[block.id], (
                f"block {block.id}: {block.ref_count} references, {held[block.id]} tables,"
                f" {self.retained[block.id]} ends of copies"
            )

    def all_tables(self) -> list[BlockTable]:
        """Every table that holds references, of all layer groups."""
        return list(self.tables.values())


def _ids(blocks: Seq[Block]) -> tuple[int, ...]:
    return tuple(block.id for block in blocks)


def num_idle(blocks: Seq[Block]) -> int:
    """How many of these blocks are in the free list; the null block never is."""
    return sum(block.ref_count == 0 and block.id != NULL_BLOCK for block in blocks)

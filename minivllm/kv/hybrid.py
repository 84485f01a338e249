"""Hybrid models: layers that attend to everything beside layers with a sliding window, over one pool of blocks.

One table for all layers would keep every token's KV in every layer, and the windows would save nothing. So layers form
*groups*, and a sequence has one block table for each. All pages have the same size: every group has the same number of
layers, and a block of the pool stores `block_size` tokens in the layers of whichever group takes it (page p of the block
belongs to the group's p-th layer). Any free block then serves any group, and nothing has to be reserved for either kind.
What a window left behind is freed, and the null block keeps its place: tables stay aligned with positions.

A prefix counts as cached if all groups can go on from its end: a full group needs all of its blocks, a sliding group only
those that the next token's window reaches. Hashes are the same in all groups; a published block adds its group's number.

Source: vLLM 0.32 `v1/core/kv_cache_utils.py:get_kv_cache_groups`, `v1/core/kv_cache_coordinator.py:
HybridKVCacheCoordinator`, `v1/core/single_type_kv_cache_manager.py:SlidingWindowManager`. Different here: layers have one
shape, so that pages are equal as they are (vLLM also scales block sizes, or pads); blocks of a window are published all
along, not only at the end of a prompt; a step frees by what the steps before it compute, also where they are still under
way, because steps run in order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

from minivllm.config import ConfigError, EngineConfig
from minivllm.kv.block_pool import NULL_BLOCK, Block
from minivllm.kv.block_table import BlockTable
from minivllm.kv.manager import KVCacheManager, num_idle
from minivllm.kv.partial import PartialHit
from minivllm.kv.prefix import Index
from minivllm.plan import Emit, EventKind, Row, ignore_events
from minivllm.request import Request, Sequence

Windows = tuple[int | None, ...]
"""The window of each layer, or of each layer group, in tokens; None: it attends to everything before it."""

ONE_GROUP: Windows = (None,)
UNBOUNDED = 2**62
"""A window that nothing falls out of: with it, full attention is no special case."""


# which layers share a table


class LayerGroup(NamedTuple):
    """Layers with the same window, whose KV of a token lies in the same block."""

    window: int | None
    layers: tuple[int, ...]


def form_groups(windows: Windows, hybrid: str = "on") -> list[LayerGroup]:
    """Groups of equal size for layers with these windows, those without a window first; one for all with `hybrid` off.

    The size is the number of layers of the rarest kind, so that only a kind that is no multiple of it leaves pages
    unused; where the commonest kind has less than half as many layers again, its number: fewer tables for a little waste.
    """
    if hybrid == "off":
        return [LayerGroup(None, tuple(range(len(windows))))]
    kinds = sorted(set(windows), key=lambda window: (window is not None, window))
    layers = {kind: [i for i, window in enumerate(windows) if window == kind] for kind in kinds}
    smallest, largest = min(map(len, layers.values())), max(map(len, layers.values()))
    size = largest if largest < 1.5 * smallest else smallest
    counts = {kind: -(-len(of_kind) // size) for kind, of_kind in layers.items()}
    return [LayerGroup(kind, tuple(layers[kind][i :: counts[kind]])) for kind in kinds for i in range(counts[kind])]


# arithmetic


def num_skipped(num_computed: int, window: int, block_size: int) -> int:
    """How many leading blocks no token from position `num_computed` on attends to.

    That token's window begins at `num_computed - window + 1`; a block is skipped when it ends before that.
    """
    return max(num_computed - window + 1, 0) // block_size


def window_cap(window: int, in_flight: int, block_size: int) -> int:
    """The most blocks that a sequence holds in a sliding group, if a step computes at most `in_flight` tokens.

    The window of the step's first token, without that token itself, then the step; one block more because the first may
    begin anywhere in its block.
    """
    return -(-(window - 1 + in_flight) // block_size) + 1


def request_blocks(num_tokens: int, windows: Windows, config: EngineConfig) -> int:
    """The most blocks that a request with one sequence of `num_tokens` tokens holds at once, all groups together."""
    total, budget = -(-num_tokens // config.block_size), config.max_num_batched_tokens
    return sum(min(total, window_cap(window or UNBOUNDED, budget, config.block_size)) for window in windows)


def longest_request(usable: int, windows: Windows, config: EngineConfig, limit: int) -> int:
    """The most tokens, up to `limit`, that one sequence can have in `usable` blocks; below `limit` it is whole blocks."""
    size = config.block_size
    lengths = range(-(-limit // size) + 1)
    return min(
        limit, size * (bisect_right(lengths, usable, key=lambda n: request_blocks(n * size, windows, config)) - 1)
    )


# prefix hits


def window_hit(hashes: Seq[bytes], needed: int, index: Index) -> int:
    """The longest prefix, in blocks, whose last `needed` blocks are cached; a shorter one must be cached as a whole.

    Searched from the right: the first run that is long enough, or the one that reaches block 0. `index.find(h)` gives the
    block published under hash h, or None.
    """
    run = 0
    for i in reversed(range(len(hashes))):
        if run == needed:
            return i + 1 + run
        run = run + 1 if index.find(hashes[i]) is not None else 0
    return run


# the managers


class GroupManager(KVCacheManager):
    """The block tables of one layer group. Pool and copies in flight are those of the whole."""

    def __init__(self, whole: KVCacheManager, config: EngineConfig, window: int | None, number: int, emit: Emit):
        super().__init__(config, 0, partial(emit, group=number), pool=whole.pool)
        self.window, self.tag, self.retained = window or UNBOUNDED, bytes([number]), whole.retained
        self.cap = window_cap(self.window, config.max_num_batched_tokens, self.block_size)
        self.reach = self.blocks_for(self.window - 1)

    def find(self, block_hash: bytes) -> Block | None:
        """The block that this group published under a hash: a group is the `Index` of its lookups."""
        return self.pool.find(block_hash + self.tag)

    def hit_blocks(self, hashes: Seq[bytes]) -> list[Block]:
        """A block for each hash of a hit: those that the window reaches, and before them the null block."""
        skipped = max(len(hashes) - self.reach, 0)
        found = [block for block_hash in hashes[skipped:] if (block := self.find(block_hash)) is not None]
        return [self.pool.blocks[NULL_BLOCK]] * skipped + found

    def remove_skipped(self, sequence: Sequence) -> None:
        """Put the null block in place of those that the window has left behind, and give them up, the last one first."""
        blocks = self.tables.get(sequence.uid, BlockTable()).blocks
        gone: list[Block] = []
        for i in reversed(range(num_skipped(sequence.num_computed, self.window, self.block_size))):
            if blocks[i].id == NULL_BLOCK:
                break
            gone.append(blocks[i])
            blocks[i] = self.pool.blocks[NULL_BLOCK]
        if gone:
            self.pool.free(gone)
            ids, request = tuple(block.id for block in gone), sequence.request.id
            self._emit(EventKind.FREED, request=request, sequence=sequence.index, blocks=ids, reason="window")

    def free(self, sequence: Sequence) -> None:
        """As `KVCacheManager.free`; null blocks don't count."""
        if table := self.tables.get(sequence.uid):
            table.blocks = [block for block in table.blocks if block.id != NULL_BLOCK]
        super().free(sequence)

    def blocks_of_request(self, request: Request, num_tokens: Seq[int]) -> int:
        """The most blocks that the request holds at once in this group: the window puts a cap on each sequence."""
        return min(super().blocks_of_request(request, num_tokens), len(num_tokens) * self.cap)


class HybridKVCacheManager(KVCacheManager):
    """The managers of all layer groups, seen as one.

    `hits` are those of all groups, one group's after the other's: as many blocks for each, null blocks included.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, windows: Windows, emit: Emit = ignore_events) -> None:
        if config.partial_block_hits:
            raise ConfigError("partial_block_hits", True, 'needs layers of one kind: set it to False, or hybrid="off"')
        super().__init__(config, num_blocks, emit)
        self.groups = [GroupManager(self, config, window, number, emit) for number, window in enumerate(windows)]
        self.tables = self.groups[0].tables

    def lookup(self, sequence: Sequence, num_tokens: int) -> list[Block]:
        """The longest prefix that all groups can go on from, for each of them. No side effects.

        Each group in turn may only shorten it, until a round changes nothing: what is left suits all. A full group has
        every prefix of what it has, a sliding group may not, so one round is not enough in general.
        """
        if not self.reads_cache(sequence):
            return []
        hashes, before = self.hashes(sequence)[: max(num_tokens - 1, 0) // self.block_size], -1
        while len(hashes) != before:
            before = len(hashes)
            for group in self.groups:
                hashes = hashes[: window_hit(hashes, group.reach, group)]
        return [block for group in self.groups for block in group.hit_blocks(hashes)]

    def num_cached(self, hits: Seq[Block], partial: PartialHit | None) -> int:
        """How many tokens need not be computed."""
        return len(hits) // len(self.groups) * self.block_size

    def blocks_of_request(self, request: Request, num_tokens: Seq[int]) -> int:
        """The most blocks that the request holds at once, all groups together."""
        return sum(group.blocks_of_request(request, num_tokens) for group in self.groups)

    def allocate(
        self,
        sequence: Sequence,
        num_new: int,
        hits: Seq[Block] = (),
        partial: PartialHit | None = None,
        *,
        watermark: bool = False,
    ) -> list[tuple[int, int]] | None:
        """Make room in all groups, or in none. What windows left behind is given up first, and stays so.

        All hits get a reference before any group allocates: it could take a block that the next one has hit.
        """
        computed, needed = sequence.num_computed + self.num_cached(hits, None), num_idle(hits)
        for group, share in self._shares(hits):
            group.remove_skipped(sequence)
            table = group.tables.get(sequence.uid, BlockTable())
            needed += max(self.blocks_for(computed + num_new) - len(table.blocks) - len(share), 0)
            needed += group.tail_to_copy(table, computed) is not None
        if needed + (self.watermark_blocks if watermark else 0) > self.pool.num_free:
            return None
        self.pool.touch(hits)
        copies: list[tuple[int, int]] = []
        for group, share in self._shares(hits):
            copies += group.allocate(sequence, num_new, share) or ()
        self.pool.free(hits)
        return copies

    def _shares(self, hits: Seq[Block]) -> list[tuple[GroupManager, Seq[Block]]]:
        n = len(hits) // len(self.groups)
        return [(group, hits[i * n : (i + 1) * n]) for i, group in enumerate(self.groups)]

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Publish the sequence's full blocks in all groups."""
        for group in self.groups:
            group.publish(sequence, num_tokens)

    def withdraw(self, sequence: Sequence) -> None:
        """Take back, in all groups, the hashes of blocks whose KV will not be written."""
        for group in self.groups:
            group.withdraw(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`, in all groups."""
        for group in self.groups:
            group.fork(parent, child)

    def free(self, sequence: Sequence) -> None:
        """Forget a sequence's tables and give up their references."""
        for group in self.groups:
            group.free(sequence)

    def add_tables(self, rows: Seq[Row]) -> None:
        """Give the rows of a plan the tables of the groups after the first; 0 where a window left a block behind."""
        for row in rows:
            row.more_block_ids = tuple(group.block_ids(row.sequence) for group in self.groups[1:])

    def num_held(self, request: Request) -> tuple[int, int]:
        """See `KVCacheManager.num_held`; null blocks don't count."""
        tables = [group.tables[s.uid].ids for group in self.groups for s in request.live if s.uid in group.tables]
        ids = [block_id for table in tables for block_id in table if block_id != NULL_BLOCK]
        return len(set(ids)), len(ids)

    def all_tables(self) -> list[BlockTable]:
        """Every table that holds references, of all layer groups."""
        return [table for group in self.groups for table in group.tables.values()]


def make_manager(config: EngineConfig, num_blocks: int, windows: Windows, emit: Emit = ignore_events) -> KVCacheManager:
    """The manager for layer groups with these windows: a plain one where nothing slides."""
    plain = windows == ONE_GROUP
    return (
        KVCacheManager(config, num_blocks, emit) if plain else HybridKVCacheManager(config, num_blocks, windows, emit)
    )

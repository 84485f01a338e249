"""Second opinions on the prefix cache, each written from its definition: which block goes next, what is cached, what is lost."""

from collections.abc import Iterable

from minivllm.kv.block_pool import BlockPool
from minivllm.kv.manager import KVCacheManager
from minivllm.request import Sequence


class ReferenceLRU:
    """Idle cached blocks go in order of when they were last held; of one departure, the deepest in its prompt goes first
    (with `leaf_first` off: the shallowest). Blocks without content that could be hit go before all of them, the latest left first.
    """

    def __init__(self, block_ids: Iterable[int], *, leaf_first: bool = True) -> None:
        self.spare = list(block_ids)
        self.sign = -1 if leaf_first else 1
        self.idle: dict[int, tuple[int, int]] = {}
        self.clock = 0

    def hold(self, block_id: int) -> None:
        """A hit, or a block that was taken."""
        self.idle.pop(block_id, None)
        if block_id in self.spare:
            self.spare.remove(block_id)

    def leave(self, cached: dict[int, int], spare: dict[int, int]) -> None:
        """One departure: cached blocks with their depth in the prompt, and those that hold nothing to hit."""
        self.clock += 1
        self.idle |= {block_id: (self.clock, self.sign * depth) for block_id, depth in cached.items()}
        self.spare = [*sorted(spare, key=lambda i: self.sign * spare[i]), *self.spare]

    def next(self, n: int) -> list[int]:
        """The n blocks to hand out next."""
        return [*self.spare, *sorted(self.idle, key=self.idle.__getitem__)][:n]


class Census:
    """A manager beside a naive model of it: token tuples instead of hashes, the reference LRU instead of the free list."""

    def __init__(self, kv: KVCacheManager, lru: ReferenceLRU, evicted: list[int]) -> None:
        self.kv, self.lru, self.evicted = kv, lru, evicted
        self.content: dict[int, tuple[int, ...]] = {}  # published block -> all tokens up to its end
        self.parents: dict[bytes, bytes | None] = {}
        self.num_evicted = self.num_hit = self.max_stranded = 0

    def expected_hit(self, tokens: list[int]) -> int:
        """Blocks of the longest cached prefix that leaves a token to compute, by comparing tokens."""
        size, cached = self.kv.block_size, set(self.content.values())
        hit = 0
        while (hit + 1) * size < len(tokens) and tuple(tokens[: (hit + 1) * size]) in cached:
            hit += 1
        return hit

    def begin(self, sequence: Sequence) -> bool:
        """Admit a prompt as a whole, if it fits."""
        kv, lru, tokens = self.kv, self.lru, sequence.tokens(0, sequence.num_tokens)
        free_before = [b.id for b in kv.pool.free_list]
        hits = kv.lookup(sequence, len(tokens))
        assert free_before == [b.id for b in kv.pool.free_list], "looking changed something"
        assert len(hits) == self.expected_hit(tokens)
        assert all(self.content[b.id] == tuple(tokens[: (i + 1) * kv.block_size]) for i, b in enumerate(hits))
        self.evicted.clear()
        if kv.allocate(sequence, len(tokens) - len(hits) * kv.block_size, hits) is None:
            assert free_before == [b.id for b in kv.pool.free_list], "giving up changed something"
            return False
        for block in hits:
            lru.hold(block.id)
        ids = kv.block_ids(sequence)
        fresh = ids[len(hits) :]
        assert ids[: len(hits)] == [b.id for b in hits]
        assert fresh == lru.next(len(fresh)), "blocks are handed out in another order than the reference's"
        assert self.evicted == [b for b in fresh if b in self.content], "evictions are the cached ones among them"
        self.num_hit += len(hits)
        self._note(sequence, tokens, fresh)
        return True

    def _note(self, sequence: Sequence, tokens: list[int], fresh: list[int]) -> None:
        size, ids = self.kv.block_size, self.kv.block_ids(sequence)
        for block_id in fresh:
            self.num_evicted += self.content.pop(block_id, None) is not None
            self.lru.hold(block_id)
        for i in range(len(tokens) // size):
            self.content[ids[i]] = tuple(tokens[: (i + 1) * size])
            self.parents[sequence.block_hashes[i]] = sequence.block_hashes[i - 1] if i else None
        self.max_stranded = max(self.max_stranded, stranded(self.kv.pool, self.parents))

    def end(self, sequence: Sequence) -> None:
        """A prompt leaves."""
        ids = self.kv.block_ids(sequence)
        self.kv.free(sequence)
        idle = {i: depth for depth, i in enumerate(ids) if self.kv.pool.blocks[i].ref_count == 0}
        cached = {i: depth for i, depth in idle.items() if i in self.content}
        self.lru.leave(cached, {i: depth for i, depth in idle.items() if i not in self.content})


def stranded(pool: BlockPool, parents: dict[bytes, bytes | None]) -> int:
    """Published hashes that no lookup can reach, because a parent on the way to the root is not published."""

    def reachable(block_hash: bytes | None) -> bool:
        return block_hash is None or (block_hash in pool.published and reachable(parents[block_hash]))

    return sum(not reachable(block_hash) for block_hash in pool.published)

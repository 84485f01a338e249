"""kv-01: allocate, touch and free keep every block in exactly one place."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from minivllm.course.expect import must_raise
from minivllm.kv.block_pool import BlockPool, OutOfBlocks
from minivllm.plan import EventKind


def part(name: str) -> pytest.MarkDecorator:
    return pytest.mark.part("kv-01", name)


def ids(blocks) -> list[int]:
    return [block.id for block in blocks]


def free_ids(pool: BlockPool) -> list[int]:
    """The free list, next to be handed out first."""
    return ids(pool.free_list)


def state(pool: BlockPool) -> object:
    """Everything a failed call must leave as it was."""
    index = {key: sorted(copies) for key, copies in pool.published.items()}
    return [(b.id, b.ref_count, b.hash) for b in pool.blocks], free_ids(pool), index


def published(pool: BlockPool, n: int, *, free: bool = True) -> list:
    """`n` blocks published as b"0", b"1", ..., and freed in that order."""
    blocks = pool.allocate(n)
    for i, block in enumerate(blocks):
        pool.publish(block, str(i).encode())
    if free:
        pool.free(blocks)
    return blocks


@part("allocate takes from the head of the free list, or nothing at all")
class TestAllocate:
    def test_takes_from_the_head_in_order(self):
        pool = BlockPool(6)
        assert ids(pool.allocate(2)) == [1, 2], "blocks must come from the head of the free list, in its order"
        assert ids(pool.allocate(3)) == [3, 4, 5], "blocks must come from the head of the free list, in its order"

    def test_gives_each_block_one_reference(self):
        assert [b.ref_count for b in BlockPool(4).allocate(3)] == [1, 1, 1], "a new block has exactly one holder"

    def test_never_hands_out_the_null_block(self):
        assert 0 not in ids(BlockPool(5).allocate(4)), "block 0 stands for 'no block': it must never be handed out"

    def test_all_or_nothing(self):
        pool = BlockPool(5)
        published(pool, 3)
        before = state(pool)
        with must_raise(OutOfBlocks, "allocating 5 blocks when 4 are free"):
            pool.allocate(5)
        assert state(pool) == before, (
            "an allocate that fails must leave the pool as it was: no block taken, no hash lost"
        )

    def test_none_is_a_fine_number_of_blocks(self):
        pool = BlockPool(3)
        pool.allocate(2)
        assert pool.allocate(0) == [], "allocate(0) gives no blocks, also when none are free"


@part("an allocated block can no longer be hit")
class TestEvict:
    def test_the_hash_leaves_block_and_index(self):
        pool = BlockPool(3)
        published(pool, 2)
        [block] = pool.allocate(1)
        assert block.hash is None, "a block that is handed out again must not keep the hash of its old content"
        assert pool.find(b"0") is None, "the index still finds content that is about to be overwritten"
        assert pool.find(b"1") is not None, "only the blocks that are taken are evicted"

    def test_another_copy_stays_findable(self):
        pool = BlockPool(3)
        first, second = pool.allocate(2)
        pool.publish(first, b"same")
        pool.publish(second, b"same")
        pool.free([first])
        pool.allocate(1)
        assert pool.find(b"same") is second, "a second block with the same content must stay findable"

    def test_each_eviction_is_reported_once(self):
        events = []

        def emit(kind, **fields):
            events.append((kind, fields.get("blocks")))

        pool = BlockPool(4, emit=emit)
        published(pool, 2)
        events.clear()
        pool.allocate(3)
        evicted = sorted(blocks for kind, blocks in events if kind is EventKind.EVICTED)
        assert evicted == [(1,), (2,)], "each block whose hash is dropped must be one EVICTED event, others none"


@part("a shared block stays until its last holder frees it")
class TestShare:
    def test_needs_as_many_frees_as_holders(self):
        pool = BlockPool(3)
        blocks = pool.allocate(1)
        pool.touch(blocks)
        pool.free(blocks)
        assert free_ids(pool) == [2], "a block that somebody still holds must not be free"
        pool.free(blocks)
        assert sorted(free_ids(pool)) == [1, 2], "with its last holder gone a block must return to the free list"

    def test_a_hit_takes_a_free_block_out_of_the_middle(self):
        pool = BlockPool(5)
        blocks = published(pool, 3)
        pool.touch([blocks[1]])
        assert free_ids(pool) == [4, 1, 3], "a free block that is hit leaves the free list wherever it stood"
        assert blocks[1].ref_count == 1, "a hit adds one reference"
        assert blocks[1].hash == b"1", "a block that is hit stays published: others may hit it too"

    def test_every_block_of_a_hit_is_held(self):
        pool = BlockPool(5)
        blocks = published(pool, 3)
        pool.touch(blocks)
        pool.allocate(1)
        assert [b.ref_count for b in blocks] == [1, 1, 1], "every block of the hit needs a reference, not only the last"
        with must_raise(OutOfBlocks, "allocating when all blocks are held, three of them by a hit,"):
            pool.allocate(1)

    def test_the_null_block_is_nobodys(self):
        pool = BlockPool(3)
        before = state(pool)
        pool.touch([pool.blocks[0]])
        pool.free([pool.blocks[0]])
        assert state(pool) == before, "touching or freeing the null block changes nothing"

    def test_takes_any_iterable(self):
        pool = BlockPool(4)
        blocks = pool.allocate(2)
        pool.touch(block for block in blocks)
        pool.free(block for block in blocks)
        assert [b.ref_count for b in blocks] == [1, 1], "`blocks` may be any iterable, also one that can be walked once"


@part("freeing more often than held is an error that changes nothing")
class TestDoubleFree:
    def test_a_block_nobody_holds(self):
        pool = BlockPool(3)
        blocks = pool.allocate(1)
        pool.free(blocks)
        before = state(pool)
        with must_raise(ValueError, "freeing a block that nobody holds"):
            pool.free(blocks)
        assert state(pool) == before, "a refused free must change nothing"

    def test_twice_in_one_call(self):
        pool = BlockPool(3)
        [block] = pool.allocate(1)
        before = state(pool)
        with must_raise(ValueError, "freeing a block twice in one call when it has one holder"):
            pool.free([block, block])
        assert state(pool) == before, "a call that frees a block twice and holds it once must change nothing"

    def test_the_good_ones_before_a_bad_one_are_kept(self):
        pool = BlockPool(4)
        good, bad = pool.allocate(2)
        pool.free([bad])
        before = state(pool)
        with must_raise(ValueError, "freeing two blocks of which nobody holds the second"):
            pool.free([good, bad])
        assert state(pool) == before, "when one block can't be freed none is"

    def test_twice_is_right_for_two_holders(self):
        pool = BlockPool(3)
        [block] = pool.allocate(1)
        pool.touch([block])
        pool.free([block, block])
        assert block.ref_count == 0, "two references may be dropped in one call"
        assert block.id in free_ids(pool), "a block without holder is free"


@part("freed blocks queue in the order that the cache wants")
class TestOrder:
    def test_published_ones_queue_at_the_tail(self):
        pool = BlockPool(6)
        blocks = published(pool, 3, free=False)
        pool.free(blocks[::-1])
        assert free_ids(pool) == [4, 5, 3, 2, 1], "published blocks go to the tail, in the order given"

    def test_others_are_used_again_first(self):
        pool = BlockPool(6)
        blocks = pool.allocate(3)
        pool.free(blocks)
        assert free_ids(pool) == [1, 2, 3, 4, 5], "unpublished blocks go to the head as a group, in the order given"

    def test_a_mixed_call(self):
        pool = BlockPool(7)
        blocks = pool.allocate(4)
        pool.publish(blocks[0], b"0")
        pool.publish(blocks[2], b"2")
        pool.free(blocks)
        assert free_ids(pool) == [2, 4, 5, 6, 1, 3], "published blocks to the tail, the others to the head"

    def test_without_lifo_all_queue_at_the_tail(self):
        pool = BlockPool(5, lifo_unhashed=False)
        pool.free(pool.allocate(2))
        assert free_ids(pool) == [3, 4, 1, 2], "with lifo_unhashed off, unpublished blocks queue at the tail too"


class Calls(RuleBasedStateMachine):
    """Any calls, beside a model that holds nothing but numbers: references by block id, and the free list's ids."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(7)
        self.references = dict.fromkeys(range(1, 7), 0)
        self.queue = list(range(1, 7))
        self.hashes: dict[int, bytes] = {}
        self.fresh = 0

    @rule(n=st.integers(0, 7))
    def allocate(self, n):
        if n > len(self.queue):
            with must_raise(OutOfBlocks, f"allocating {n} blocks when {len(self.queue)} are free"):
                self.pool.allocate(n)
            return
        wanted, self.queue = self.queue[:n], self.queue[n:]
        assert ids(self.pool.allocate(n)) == wanted, "allocate must take the head of the free list"
        for id in wanted:
            self.references[id] = 1
            self.hashes.pop(id, None)

    @rule(which=st.lists(st.integers(1, 6), max_size=4))
    def touch(self, which):
        self.pool.touch([self.pool.blocks[id] for id in which])
        for id in which:
            self.references[id] += 1
        self.queue = [id for id in self.queue if id not in which]

    @rule(which=st.lists(st.integers(1, 6), max_size=5, unique=True))
    def free(self, which):
        blocks = [self.pool.blocks[id] for id in which]
        if not all(self.references[id] for id in which):
            unheld = [id for id in which if not self.references[id]]
            with must_raise(ValueError, f"freeing blocks {which}, of which nobody holds {unheld},"):
                self.pool.free(blocks)
            return
        self.pool.free(blocks)
        for id in which:
            self.references[id] -= 1
        gone = [id for id in which if not self.references[id]]
        self.queue = (
            [id for id in gone if id not in self.hashes] + self.queue + [id for id in gone if id in self.hashes]
        )

    @precondition(lambda self: any(n and id not in self.hashes for id, n in self.references.items()))
    @rule(data=st.data())
    def publish(self, data):
        candidates = [id for id, n in self.references.items() if n and id not in self.hashes]
        id = data.draw(st.sampled_from(candidates))
        self.hashes[id] = str(self.fresh).encode()
        self.pool.publish(self.pool.blocks[id], self.hashes[id])
        self.fresh += 1

    @invariant()
    def agrees_with_the_model(self):
        self.pool.integrity()
        assert {b.id: b.ref_count for b in self.pool.blocks[1:]} == self.references, (
            "the references of each block id are wrong"
        )
        assert free_ids(self.pool) == self.queue, "the ids in the free list, head first, are wrong"
        assert {b.id: b.hash for b in self.pool.blocks if b.hash} == self.hashes, (
            "the hashes of published block ids are wrong"
        )


@part("after any calls every block is in exactly one place")
def test_any_calls():
    run_state_machine_as_test(Calls)

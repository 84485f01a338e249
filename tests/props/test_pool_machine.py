"""The block pool against plain Python: a list for the free list, a dict for the holders, a list of pairs for the index."""

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.kv.block_pool import NULL_BLOCK, Block, BlockPool, FreeList, OutOfBlocks
from minivllm.plan import EventKind


class FreeListMachine(RuleBasedStateMachine):
    """Any order of operations on the linked list is the same on a Python list."""

    def __init__(self):
        super().__init__()
        self.free, self.model = FreeList(), []
        self.blocks = [Block(i) for i in range(6)]

    @rule(i=st.integers(0, 5), front=st.booleans())
    def insert(self, i, front):
        put = self.free.prepend if front else self.free.append
        if i in self.model:
            with pytest.raises(ValueError, match="already"):
                put(self.blocks[i])
        else:
            put(self.blocks[i])
            self.model.insert(0 if front else len(self.model), i)

    @rule(i=st.integers(0, 5))
    def remove(self, i):
        if i in self.model:
            self.free.remove(self.blocks[i])
            self.model.remove(i)
        else:
            with pytest.raises(ValueError, match="not in the free list"):
                self.free.remove(self.blocks[i])

    @rule()
    def pop_head(self):
        if self.model:
            assert self.free.pop_head().id == self.model.pop(0)
        else:
            with pytest.raises(OutOfBlocks):
                self.free.pop_head()

    @invariant()
    def same_order_both_ways(self):
        assert [b.id for b in self.free] == self.model
        assert len(self.free) == len(self.model)
        listed = [self.blocks[i] for i in self.model]
        assert all(left.next is right and right.prev is left for left, right in pairwise(listed))
        assert all((b.prev, b.next) == (None, None) for b in self.blocks if b.id not in self.model)


class PoolMachine(RuleBasedStateMachine):
    """Blocks are taken, shared, published, withdrawn and given back in any order."""

    @initialize(size=st.integers(2, 8), caching=st.sampled_from([True, True, False]), lifo=st.booleans())
    def start(self, size, caching, lifo):
        self.seen = []
        self.pool = BlockPool(size, caching=caching, lifo_unhashed=lifo, emit=self.listen)
        self.size, self.caching, self.lifo = size, caching, lifo
        self.free = list(range(1, size))
        self.refs = dict.fromkeys(range(1, size), 0)
        self.index = []  # (hash, block id) in order of publication

    def listen(self, kind, blocks):
        """The index as the events tell it: only ids, but every change."""
        (block_id,) = blocks
        if kind is EventKind.PUBLISHED:
            self.seen.append(block_id)
        else:
            assert kind in (EventKind.EVICTED, EventKind.WITHDRAWN)
            self.seen.remove(block_id)

    def block(self, block_id):
        return self.pool.blocks[block_id]

    def hash_of(self, block_id):
        return next((key for key, id in self.index if id == block_id), None)

    def held(self):
        return [i for i, n in self.refs.items() if n]

    @rule(n=st.integers(0, 8))
    def allocate(self, n):
        if n > len(self.free):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            return
        taken, self.free = self.free[:n], self.free[n:]
        assert [b.id for b in self.pool.allocate(n)] == taken
        self.index = [pair for pair in self.index if pair[1] not in taken]
        self.refs |= dict.fromkeys(taken, 1)

    @rule(data=st.data())
    def touch(self, data):
        chosen = data.draw(st.lists(st.integers(0, self.size - 1), max_size=3))
        self.pool.touch(self.block(i) for i in chosen)
        for i in chosen:
            if i != NULL_BLOCK:
                self.refs[i] += 1
        self.free = [i for i in self.free if i not in chosen]

    @rule(data=st.data())
    def give_back(self, data):
        chosen = data.draw(st.lists(st.integers(0, self.size - 1), max_size=4))
        given = [i for i in chosen if i != NULL_BLOCK]
        if any(given.count(i) > self.refs[i] for i in given):
            with pytest.raises(ValueError, match="more often than it is held"):
                self.pool.free([self.block(i) for i in chosen])
            return
        self.pool.free(self.block(i) for i in chosen)
        idle = []
        for i in given:
            self.refs[i] -= 1
            if self.refs[i] == 0:
                idle.append(i)
        head = [i for i in idle if self.lifo and self.hash_of(i) is None]
        self.free = [*head, *self.free, *(i for i in idle if i not in head)]

    @rule(data=st.data())
    def publish(self, data):
        block_id = data.draw(st.sampled_from([NULL_BLOCK, *self.held()]))
        key = data.draw(st.sampled_from([b"a", b"b"]))
        if not self.caching or block_id == NULL_BLOCK:
            self.pool.publish(self.block(block_id), key)
        elif self.hash_of(block_id) is not None:
            with pytest.raises(ValueError, match="published already"):
                self.pool.publish(self.block(block_id), key)
        else:
            self.pool.publish(self.block(block_id), key)
            self.index.append((key, block_id))

    @precondition(lambda self: self.index)
    @rule(data=st.data())
    def withdraw(self, data):
        pair = data.draw(st.sampled_from(self.index))
        self.pool.withdraw(self.block(pair[1]))
        self.index.remove(pair)

    @rule()
    def forget_everything(self):
        order = list(self.pool.free_list)
        done = self.pool.reset_prefix_cache()
        assert done == (not self.held())
        assert order == list(self.pool.free_list)
        if done:
            self.index.clear()

    @invariant()
    def same_as_the_model(self):
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.integrity()
        assert [b.id for b in pool.free_list] == self.free
        assert {b.id: b.ref_count for b in pool.blocks[1:]} == self.refs
        assert {b.id: b.hash for b in pool.blocks} == {i: self.hash_of(i) for i in range(self.size)}
        for key in (b"a", b"b"):
            first = next((id for hash, id in self.index if hash == key), None)
            found = pool.find(key)
            assert (found.id if found else None) == first
        assert sorted(self.seen) == sorted(id for _, id in self.index)
        assert set(self.free) | set(self.held()) == set(range(1, self.size))
        assert pool.num_free + len(self.held()) == pool.num_usable


TestFreeList = FreeListMachine.TestCase
TestPool = PoolMachine.TestCase

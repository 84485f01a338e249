"""kv-03: the free list is a queue of constant cost, and sequences enter it last block first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from minivllm.config import EngineConfig
from minivllm.course.cost import counted, typical_work
from minivllm.course.expect import must_raise
from minivllm.kv.block_pool import Block, FreeList, OutOfBlocks
from minivllm.kv.manager import KVCacheManager
from minivllm.plan import EventKind
from minivllm.request import Request, SamplingParams, Sequence


def part(name: str) -> pytest.MarkDecorator:
    return pytest.mark.part("kv-03", name)


def filled(n: int, kind: type = Block) -> tuple[FreeList, list[Block]]:
    """A list of blocks 0 .. n - 1, head first, and the blocks."""
    free, blocks = FreeList(), [kind(i) for i in range(n)]
    for block in blocks:
        free.append(block)
    return free, blocks


def ids(free: FreeList) -> list[int]:
    return [block.id for block in free]


@part("blocks leave in the order they came, head first")
class TestQueue:
    def test_first_in_first_out(self):
        free, blocks = filled(3)
        assert [free.pop_head().id for _ in blocks] == [0, 1, 2], (
            "append puts at the tail, pop_head takes from the head"
        )

    def test_prepended_blocks_leave_next(self):
        free, _ = filled(2)
        free.prepend(Block(9))
        assert ids(free) == [9, 0, 1], "prepend puts a block at the head: it is handed out next"

    def test_length_and_order_are_those_of_what_is_in_it(self):
        free, _ = filled(3)
        assert (len(free), ids(free)) == (3, [0, 1, 2]), "len counts the blocks, iterating goes from head to tail"
        assert len(free) == 3, "iterating takes nothing out"
        free.pop_head()
        assert (len(free), ids(free)) == (2, [1, 2]), "a block that left is no longer counted"

    def test_an_empty_list_has_no_head(self):
        free, _ = filled(1)
        free.pop_head()
        for _ in range(2):
            with must_raise(OutOfBlocks, "pop_head of an empty list"):
                free.pop_head()
        assert (len(free), ids(free)) == (0, []), "a failed pop_head changes nothing"


@part("a block can be taken from anywhere, once")
class TestRemove:
    @pytest.mark.parametrize("which", [0, 1, 2, 3])
    def test_from_anywhere(self, which):
        free, blocks = filled(4)
        free.remove(blocks[which])
        left = [i for i in range(4) if i != which]
        assert (len(free), ids(free)) == (3, left), f"with block {which} of 4 removed the others keep their order"
        assert [free.pop_head().id for _ in left] == left, "a removed block must never be handed out: somebody holds it"

    def test_what_is_not_there_cannot_be_removed(self):
        free, blocks = filled(3)
        free.remove(blocks[1])
        free.pop_head()
        for block, who in ((blocks[0], "popped"), (blocks[1], "removed"), (Block(7), "never put in")):
            with must_raise(ValueError, f"removing a block that was {who}"):
                free.remove(block)
        assert (len(free), ids(free)) == (1, [2]), "a refused remove changes nothing"

    @pytest.mark.parametrize("put", ["append", "prepend"])
    def test_what_is_there_cannot_come_in_again(self, put):
        free, blocks = filled(3)
        with must_raise(ValueError, f"{put} of a block that is in the list already"):
            getattr(free, put)(blocks[1])
        assert (len(free), ids(free)) == (3, [0, 1, 2]), f"a refused {put} changes nothing"

    def test_a_block_that_left_may_come_back(self):
        free, blocks = filled(3)
        free.remove(blocks[0])
        free.append(blocks[0])
        free.prepend(free.pop_head())
        assert ids(free) == [1, 2, 0], "used, and given back: a block that returns is the most recently used one"


@part("no operation looks at all the blocks")
class TestCost:
    @pytest.mark.parametrize("name", ["pop_head", "remove", "append", "prepend", "len"])
    def test_costs_the_same_for_a_long_list(self, name):
        few, many = (self.cost(name, n) for n in (64, 4096))
        assert many < 3 * few + 100, (
            f"{name} takes {few:.0f} steps in a list of 64 blocks and {many:.0f} in one of 4096: it must not grow with the list"
        )

    def cost(self, name: str, n: int) -> float:
        free, blocks = filled(n, counted(Block))
        middle, new = blocks[n // 2 : n // 2 + 15], [counted(Block)(n + i) for i in range(15)]
        calls = {
            "pop_head": [free.pop_head] * 15,
            "remove": [lambda b=b: free.remove(b) for b in middle],
            "append": [lambda b=b: free.append(b) for b in new],
            "prepend": [lambda b=b: free.prepend(b) for b in new],
            "len": [lambda: len(free)] * 15,
        }
        return typical_work(calls[name])


def manager(num_blocks: int, block_size: int = 2, events: list | None = None, **switches) -> KVCacheManager:
    def _emit(kind, **fields):
        if events is not None:
            events.append((kind, fields))

    return KVCacheManager(EngineConfig(block_size=block_size, **switches), num_blocks, _emit)


numbers = iter(range(10**9))


def sequence(tokens: list[int]) -> Sequence:
    request = Request(f"r{(uid := next(numbers))}", tokens, SamplingParams(), max_tokens=1)
    request.sequences[0].uid = uid
    return request.sequences[0]


def run(kv: KVCacheManager, tokens: list[int]) -> Sequence | None:
    """Admit a sequence with all its tokens, as the scheduler does; None if the blocks don't suffice."""
    one = sequence(tokens)
    hits = kv.lookup(one, len(tokens))
    if kv.allocate(one, len(tokens) - len(hits) * kv.block_size, hits) is None:
        return None
    one.num_computed = len(tokens)
    return one


@part("a sequence gives up its blocks last one first")
class TestFree:
    def test_the_last_block_is_evicted_first(self):
        kv = manager(5)
        kv.free(run(kv, list(range(8))))
        assert ids(kv.pool.free_list) == [4, 3, 2, 1], "of one sequence the last block must be the next to be evicted"

    def test_root_first_is_a_switch(self):
        kv = manager(5, free_order="root_first")
        kv.free(run(kv, list(range(8))))
        assert ids(kv.pool.free_list) == [1, 2, 3, 4], (
            "with leaf_first off the first block must be the next to be evicted"
        )

    def test_one_eviction_leaves_the_rest_to_be_hit(self):
        kv = manager(5)
        kv.free(run(kv, list(range(8))))
        kv.pool.allocate(1)
        hit = len(kv.lookup(sequence(list(range(9))), 9))
        assert hit == 3, f"after one of 4 blocks was evicted 3 must still be found, not {hit}"

    def test_what_others_share_stays(self):
        kv = manager(6)
        first, second = run(kv, [1, 2, 3, 4, 5]), run(kv, [1, 2, 3, 4, 6])
        kv.free(first)
        held = [b.id for b in kv.tables[second.uid].blocks]
        assert held == [1, 2, 4], "the second sequence shares two blocks"
        assert not set(held) & set(ids(kv.pool.free_list)), "blocks that another sequence holds are not free"
        kv.integrity()

    def test_is_forgotten_and_reported(self):
        events = []
        kv = manager(4, events=events)
        one = run(kv, [1, 2, 3, 4])
        kv.free(one)
        kv.free(one)
        assert one.uid not in kv.tables, "a sequence that was freed has no table"
        freed = [fields for kind, fields in events if kind is EventKind.FREED]
        assert len(freed) == 1, f"freed once, and once more without a table: {len(freed)} FREED events, not 1"
        assert freed == [{"request": one.request.id, "sequence": 0, "blocks": (2, 1)}], (
            "the FREED event must name the request, the sequence's index, and the blocks as a tuple in the order given up"
        )

    def test_a_table_without_blocks_is_forgotten_and_not_reported(self):
        events = []
        kv = manager(4, events=events)
        one = sequence([1])
        kv.allocate(one, 0)
        kv.free(one)
        assert one.uid not in kv.tables, "a sequence that was freed has no table, also when it had no blocks"
        assert events == [], "a table without blocks gives nothing up: no event"


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=11)


@part("every cached block can still be hit, whatever was evicted")
class TestReach:
    @given(st.lists(st.tuples(tokens, st.booleans()), max_size=12), st.integers(4, 9))
    def test_every_published_block_has_its_parent(self, requests, num_blocks):
        kv = manager(num_blocks)
        live: list[Sequence] = []
        parents: dict[bytes, bytes | None] = {}
        for prompt, keep in requests:
            one = run(kv, prompt)
            if one is None:
                kv.free(live.pop(0)) if live else None
                continue
            parents |= dict(zip(one.block_hashes, [None, *one.block_hashes], strict=False))
            live.append(one)
            if not keep:
                kv.free(live.pop(0))
            cached = kv.pool.published
            stranded = [i for h in cached if parents[h] not in (None, *cached) for i in cached[h]]
            assert stranded == [], f"the block before blocks {stranded} was evicted: they can never be hit again"

    @given(st.integers(1, 9), st.integers(0, 9))
    def test_k_evictions_cost_at_most_k_blocks(self, num_blocks, k):
        kv = manager(num_blocks + 1)
        prompt = list(range(2 * num_blocks))
        kv.free(run(kv, prompt))
        kv.pool.allocate(min(k, num_blocks))
        hit = len(kv.lookup(sequence([*prompt, 0]), len(prompt) + 1))
        assert hit == max(num_blocks - k, 0), f"of {num_blocks} blocks {k} were evicted, but {hit} are found"


class Calls(RuleBasedStateMachine):
    """Any calls, beside a Python list that is searched and copied without shame."""

    def __init__(self):
        super().__init__()
        self.free = FreeList()
        self.blocks = [Block(i) for i in range(5)]
        self.model: list[int] = []

    @rule(id=st.integers(0, 4), at_head=st.booleans())
    def put(self, id, at_head):
        method = self.free.prepend if at_head else self.free.append
        if id in self.model:
            with must_raise(ValueError, f"{method.__name__} of block {id} to a list of blocks {self.model}"):
                method(self.blocks[id])
        else:
            method(self.blocks[id])
            self.model.insert(0 if at_head else len(self.model), id)

    @rule(id=st.integers(0, 4))
    def remove(self, id):
        if id in self.model:
            self.free.remove(self.blocks[id])
            self.model.remove(id)
        else:
            with must_raise(ValueError, f"removing block {id} from a list of blocks {self.model}"):
                self.free.remove(self.blocks[id])

    @rule()
    def pop_head(self):
        if self.model:
            assert self.free.pop_head().id == self.model.pop(0), "pop_head must give the head"
        else:
            with must_raise(OutOfBlocks, "pop_head of an empty list"):
                self.free.pop_head()

    @invariant()
    def agrees_with_the_model(self):
        assert ids(self.free) == self.model, "iterating must give these block ids, head first"
        assert len(self.free) == len(self.model), "len is wrong"


@part("for any calls the list is the one that a plain Python list gives")
def test_any_calls():
    run_state_machine_as_test(Calls)

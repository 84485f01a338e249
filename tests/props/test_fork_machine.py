"""Forks, writes and prunes in any order, against a model of what each sequence should see and of how much must be held."""

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.config import EngineConfig
from minivllm.kv.manager import KVCacheManager
from minivllm.request import Request, SamplingParams, Sequence

USABLE = 24


class ForkMachine(RuleBasedStateMachine):
    """Every sequence has a copy of its own of everything, in `expected`: token by token what it should read.

    `lineages` says, for each of its blocks, which write made it what it is: a fork hands lineages on, a write into a
    block that others have too starts a new one. Blocks held must be the distinct ones, no more and no fewer.
    """

    @initialize(block_size=st.integers(1, 4), caching=st.booleans(), prompt=st.integers(1, 9))
    def start(self, block_size, caching, prompt):
        self.size = block_size
        self.kv = KVCacheManager(EngineConfig(block_size=block_size, enable_prefix_caching=caching), USABLE + 1)
        self.slots = [0] * ((USABLE + 1) * block_size)
        self.names, self.uids, self.in_flight = count(1), count(), []
        self.expected: dict[Sequence, list[int]] = {}
        self.lineages: dict[Sequence, list[int]] = {}
        trunk = self.sequence(list(range(100, 100 + prompt)))
        self.expected[trunk], self.lineages[trunk] = [], []
        self.write(trunk, prompt)

    def sequence(self, prompt):
        """Each sequence is a request's only one here: whose they are is the scheduler's matter."""
        sequence = Request("r", list(prompt), SamplingParams(), max_tokens=99).sequences[0]
        sequence.uid = next(self.uids)
        return sequence

    def write(self, sequence, number):
        """A step that runs `number` tokens of one sequence: False if there is no room."""
        copies = self.kv.allocate(sequence, number)
        if copies is None:
            return False
        read = [(target, self.slots[source * self.size : (source + 1) * self.size]) for source, target in copies]
        for target, content in read:
            self.slots[target * self.size : (target + 1) * self.size] = content
        for position in range(sequence.num_computed, sequence.num_computed + number):
            self.note_write(sequence, position)
            self.slots[self.slot(sequence, position)] = self.expected[sequence][position]
        sequence.num_computed += number
        self.in_flight += copies
        return True

    def note_write(self, sequence, position):
        mine, index = self.lineages[sequence], position // self.size
        if index == len(mine):
            mine.append(next(self.names))
        elif any(other is not sequence and mine[index] in table for other, table in self.lineages.items()):
            mine[index] = next(self.names)
        self.expected[sequence].append(next(self.names))

    def slot(self, sequence, position):
        return self.kv.block_ids(sequence)[position // self.size] * self.size + position % self.size

    def pick(self, data):
        return data.draw(st.sampled_from(list(self.expected)))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def draw_and_write(self, data):
        sequence = self.pick(data)
        sequence.output_token_ids.append(next(self.names))
        if not self.write(sequence, 1):
            sequence.output_token_ids.pop()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.pick(data)
        child = self.sequence(parent.request.prompt_token_ids)
        child.output_token_ids[:] = parent.output_token_ids
        self.kv.fork(parent, child)
        self.expected[child], self.lineages[child] = list(self.expected[parent]), list(self.lineages[parent])

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def prune(self, data):
        sequence = self.pick(data)
        self.kv.free(sequence)
        del self.expected[sequence], self.lineages[sequence]

    @rule()
    def complete_the_steps(self):
        self.kv.release(self.in_flight)
        self.in_flight = []

    @invariant()
    def everybody_sees_its_own(self):
        for sequence, content in getattr(self, "expected", {}).items():
            assert [self.slots[self.slot(sequence, p)] for p in range(len(content))] == content

    @invariant()
    def no_more_is_held_than_what_differs(self):
        if hasattr(self, "kv"):
            self.kv.integrity()
            ends = {block_id for pair in self.in_flight for block_id in pair}
            tables = {block_id for s in self.expected for block_id in self.kv.block_ids(s)}
            assert len(tables) == len({name for table in self.lineages.values() for name in table})
            assert self.kv.pool.num_usable - self.kv.pool.num_free == len(tables | ends)

    def teardown(self):
        if hasattr(self, "kv"):
            for sequence in self.expected:
                self.kv.free(sequence)
            self.kv.release(self.in_flight)
            assert self.kv.pool.num_free == USABLE


TestForks = ForkMachine.TestCase
TestForks.settings = settings(stateful_step_count=30)

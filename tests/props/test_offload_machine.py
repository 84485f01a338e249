"""The host tier against a dictionary: what it promises to hold, in which order it forgets, and never more than its room."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.kv.offload import HostTier, pin

keys = st.lists(st.sampled_from([bytes([n]) for n in range(8)]), min_size=1, max_size=4, unique=True)


class TierMachine(RuleBasedStateMachine):
    """`promised` maps a key to what was stored under it, least recently used first; `memory` is what the slots hold."""

    @initialize(capacity=st.integers(0, 5))
    def start(self, capacity):
        self.capacity, self.tier = capacity, HostTier(capacity)
        self.promised: dict[bytes, bytes] = {}
        self.memory: dict[int, bytes] = {}
        self.storing: list[bytes] = []
        self.loading: list[bytes] = []

    @rule(keys=keys)
    def store(self, keys):
        missing = [key for key in keys if key not in self.promised]
        idle = [k for k in self.promised if k not in (*keys, *self.storing, *self.loading)]
        gone = idle[: max(len(self.promised) + len(missing) - self.capacity, 0)]
        fresh = self.tier.store(keys)
        fits = len(self.promised) - len(gone) + len(missing) <= self.capacity
        assert (fresh is not None) == fits
        if fresh is not None:
            assert list(fresh) == missing
            self.promised = {k: v for k, v in self.promised.items() if k not in gone} | {k: k for k in missing}
            self.storing += missing

    @precondition(lambda self: self.storing)
    @rule()
    def complete_a_store(self):
        key = self.storing.pop(0)
        slot = self.tier.slots[key]
        self.memory[slot.id] = key
        slot.ready = True

    @rule(keys=keys)
    def begin_a_load(self, keys):
        for key in keys:
            slot = self.tier.find(key)
            assert (slot is not None) == (key in self.promised and key not in self.storing)
            if slot is not None:
                pin([slot], 1)
                self.loading.append(key)

    @precondition(lambda self: self.loading)
    @rule()
    def complete_a_load(self):
        key = self.loading.pop(0)
        slot = self.tier.find(key)
        assert self.memory[slot.id] == key, "somebody else's content was loaded"
        pin([slot], -1)

    @rule(keys=keys)
    def touch(self, keys):
        self.tier.touch(keys)
        for key in reversed(keys):
            if key in self.promised:
                self.promised[key] = self.promised.pop(key)

    @invariant()
    def holds_what_it_promises(self):
        assert list(self.tier.slots) == list(self.promised)
        assert len(self.tier.slots) <= self.capacity
        self.tier.integrity()
        for key in self.promised:
            if slot := self.tier.find(key):
                assert self.memory[slot.id] == key


TestTier = TierMachine.TestCase

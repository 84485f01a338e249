"""The checkers of the host tier are checked: seeded faults, each of which must be found, and the unharmed engine must pass."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from minivllm.kv import offload
from minivllm.kv.offload import HostHit, HostSlot, HostTier, Offload
from tests.props.test_lattice_offload import CELLS, run_offload_cell
from tests.walks import walk_offload


def slots() -> None:
    """Physical slots alone: the scheduler's own integrity check stays out."""
    for seed in range(60):
        walk_offload(seed, trust=True)


def ahead() -> None:
    for seed in range(60):
        walk_offload(seed, trust=True, async_depth=1)


def books() -> None:
    for seed in range(20):
        walk_offload(seed)


def lattice() -> None:
    for cell in (c for c in CELLS if c.mixed and c.host == 200 and c.budget > 1 and c.chunked and c.block_size < 16):
        run_offload_cell(cell)


CHECKERS = [slots, ahead, books, lattice]


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_the_unharmed_engine_passes(checker):
    checker()


def pin_nothing(slots, by):
    pass


def always_ready(self):
    return True


def idle_while_it_is_loaded(self):
    return self.ready


def load_into_the_next_block(self, sequence, num_hits, hit):
    loads = original_load(self, sequence, num_hits, hit)
    return tuple(zip([slot for slot, _ in loads], [block for _, block in loads[1:] + loads[:1]], strict=True))


def load_the_slot_beside(self, sequence, num_hits, hit):
    return tuple(
        ((slot + 1) % self.tier.capacity, block) for slot, block in original_load(self, sequence, num_hits, hit)
    )


original_load = Offload.load


def one_block_on(self, sequence, num_hits, num_tokens):
    hit = original_lookup(self, sequence, num_hits + 1, num_tokens)
    return hit if hit.num_tokens else HostHit()


original_lookup = Offload.lookup


def store_the_block_before(self, row):
    row.block_ids, kept = [row.block_ids[-1], *row.block_ids[:-1]], row.block_ids
    original_store(self, row)
    row.block_ids = kept


original_store = Offload.store_computed


def one_key_for_all_last_blocks(self, sequence):
    full, rest = divmod(sequence.num_computed, self._kv.block_size)
    return self._kv.hashes(sequence)[:full] + [b"last"] * (rest > 0)


def count_the_last_block_as_full(self, sequence, num_hits, slots, limit):
    hit = original_with_last(self, sequence, num_hits, slots, limit)
    return HostHit(hit.slots, min(len(hit.slots) * self._kv.block_size, limit - num_hits * self._kv.block_size))


original_with_last = Offload._with_last


def keep_for_ever(self, sequence):
    self.swapped.pop(sequence.uid, None)


def ready_at_once(self, keys):
    fresh = original_tier_store(self, keys)
    for slot in (fresh or {}).values():
        slot.ready, slot.pins = True, 1  # found, but not evicted
    return fresh


original_tier_store = HostTier.store


@dataclass(frozen=True)
class Fault:
    """A fault, where it goes, and who must find it."""

    name: str
    owner: object
    function: str
    replacement: object
    caught_by: tuple[Callable[[], None], ...]


FAULTS = [
    Fault(
        "a slot is re-used while a load is on its way", HostSlot, "idle", property(idle_while_it_is_loaded), (ahead,)
    ),
    Fault("nothing is pinned", offload, "pin", pin_nothing, (ahead,)),
    Fault("a slot is re-used before its store has run", HostSlot, "idle", property(always_ready), (slots, books)),
    Fault("a slot is read before its store has run", HostTier, "store", ready_at_once, (ahead,)),
    Fault("a load fills the wrong block", Offload, "load", load_into_the_next_block, (slots, lattice)),
    Fault("a load reads the wrong slot", Offload, "load", load_the_slot_beside, (slots, lattice)),
    Fault("a hit is one block further on", Offload, "lookup", one_block_on, (slots, lattice)),
    Fault("a store reads the wrong block", Offload, "store_computed", store_the_block_before, (slots, lattice)),
    Fault("last blocks share a key", Offload, "_swap_keys", one_key_for_all_last_blocks, (slots,)),
    Fault("a last block counts as full", Offload, "_with_last", count_the_last_block_as_full, (slots, lattice)),
    Fault("what was swapped out is kept for ever", Offload, "forget", keep_for_ever, (books,)),
]
PAIRS = [pytest.param(f, check, id=f"{f.name}-{check.__name__}") for f in FAULTS for check in f.caught_by]


@pytest.mark.parametrize(("fault", "checker"), PAIRS)
def test_a_seeded_fault_is_found(fault, checker, monkeypatch):
    monkeypatch.setattr(fault.owner, fault.function, fault.replacement)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        checker()

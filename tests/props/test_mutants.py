"""The checkers are checked: twenty seeded faults, each of which its checker must find, and the unharmed engine must pass."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import pytest

from minivllm.kv import manager, prefix
from minivllm.kv.block_pool import NULL_BLOCK, BlockPool, FreeList
from minivllm.kv.block_table import BlockTable
from minivllm.kv.manager import KVCacheManager
from minivllm.kv.partial import PartialIndex
from minivllm.plan import Row
from minivllm.sched import scheduler
from minivllm.sched.async_sched import InFlight
from minivllm.sched.scheduler import Scheduler
from tests.lattice import cells
from tests.props.test_lattice import run_cell
from tests.props.test_lattice_async import CELLS as ASYNC_CELLS
from tests.props.test_lattice_async import run_cell as run_async_cell
from tests.props.test_lattice_beams import CELLS as BEAM_CELLS
from tests.props.test_lattice_beams import check_search
from tests.walks import walk_cache, walk_scheduler

# the checkers


def slots() -> None:
    """Physical slots alone: the scheduler's own integrity check stays out."""
    for seed in range(60):
        walk_scheduler(seed, trust=True)


def slots_under_priority() -> None:
    for seed in range(60):
        walk_scheduler(seed, trust=True, policy="priority")


def ahead() -> None:
    """Steps planned ahead: physical slots, and who may have a block while a step is on its way."""
    for seed in range(60):
        walk_scheduler(seed, trust=True, async_depth=1)


def ahead_long() -> None:
    walk_scheduler(42, async_depth=1)


def lattice_ahead() -> None:
    for cell in (c for c in ASYNC_CELLS if c.caching and c.tight and c.mixed and c.chunked and c.budget == 64):
        run_async_cell(cell)


def books() -> None:
    """The pool's and the manager's integrity checks."""
    for seed in range(20):
        walk_scheduler(seed)


def lattice() -> None:
    """The cells in which most happens: cache on, everybody together, in a tight pool."""
    busy = (c for c in cells() if c.caching and c.tight and c.mixed and c.chunked and c.max_model_len == 48)
    for cell in islice(busy, 2, None):
        run_cell(cell)


def beams() -> None:
    """Searches, where beams have to wait for each other and memory is short."""
    for cell in (c for c in BEAM_CELLS if c.tight and c.mixed and c.caching and c.block_size == 4):
        check_search(cell)


def reference_lru() -> None:
    for seed in range(10):
        walk_cache(seed)


CHECKERS = [slots, slots_under_priority, ahead, lattice_ahead, books, lattice, beams, reference_lru]


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_the_unharmed_engine_passes(checker):
    checker()


# the faults


def allocate_keeping_hashes(self, n):
    taken = [self.free_list.pop_head() for _ in range(n)]
    for block in taken:
        block.ref_count = 1
    return taken


def hash_block_alone(parent, token_ids, salt=""):
    return original_hash_block(prefix.ROOT_HASH, token_ids, salt)


original_hash_block = prefix.hash_block


def hit_to_the_last_token(hashes, num_tokens, block_size, index):
    return prefix.longest_hit(hashes, num_tokens + 1, block_size, index)


def touch_without_sharing(self, blocks):
    for block in blocks:
        if block.id != NULL_BLOCK and block.ref_count == 0:
            self.free_list.remove(block)
            block.ref_count = 1


def blocks_for_one_token_less(self, num_tokens):
    return -(-(num_tokens - 1) // self.block_size)


def free_root_first(self, sequence):
    self.leaf_first = False
    original_free(self, sequence)


original_free = KVCacheManager.free


def pop_tail(self):
    block = self._ends.prev
    self.remove(block)
    return block


def withdraw_nothing(self, sequence):
    pass


def never_copy(self, index, retained=0):
    return False


def release_nothing(self, copies):
    pass


def run_beams_in_part(request, budget):
    return request.live if request.forked else request.live[:1]


def fork_without_pruning(self, drawn):
    for sequence, token in drawn:
        if token.parent is not None:
            parent = sequence.request.sequences[token.parent]
            self.kv.fork(parent, sequence)
            sequence.output_token_ids[:] = parent.output_token_ids


def fork_tables_but_not_tokens(self, drawn):
    for sequence, token in drawn:
        if token.parent is not None:
            self.kv.free(sequence)
            self.kv.fork(sequence.request.sequences[token.parent], sequence)


def forget_nothing(self, block_ids):
    pass


def take_tokens_of_preempted(row):
    return row.sequence.finished


def free_at_once(self, sequence):
    self._kv.free(sequence)


def wait_for_nothing(self):
    return False


def forget_what_is_on_its_way(request, budget):
    return request.live if request.forked else request.live[:1]


def run_the_token_before(self):
    known = self.sequence.tokens(self.start, self.stop)
    return known if len(known) == self.num_tokens else self.sequence.tokens(self.start - 1, self.stop)


def publish_placeholders(self, sequence, num_tokens):
    known = sequence.output_token_ids
    sequence.output_token_ids = known + [-1] * sequence.num_placeholders
    original_publish(self, sequence, num_tokens)
    sequence.output_token_ids = known


original_publish = KVCacheManager.publish


@dataclass(frozen=True)
class Mutant:
    """A fault, where it goes, and who must find it."""

    name: str
    owner: object
    function: str
    replacement: Callable
    caught_by: tuple[Callable[[], None], ...]


BOTH_AHEAD = (ahead, lattice_ahead)

MUTANTS = [
    Mutant("a stale hash is kept on reuse", BlockPool, "allocate", allocate_keeping_hashes, (slots, lattice)),
    Mutant("a hash doesn't cover what is before it", prefix, "hash_block", hash_block_alone, (slots, lattice)),
    Mutant("the last token comes from the cache", manager, "longest_hit", hit_to_the_last_token, (slots, lattice)),
    Mutant("sharing takes no reference", BlockPool, "touch", touch_without_sharing, (slots, lattice, books)),
    Mutant("growth is off by one", KVCacheManager, "blocks_for", blocks_for_one_token_less, (slots, lattice)),
    Mutant("roots are freed first", KVCacheManager, "free", free_root_first, (reference_lru,)),
    Mutant("the most recent goes first", FreeList, "pop_head", pop_tail, (reference_lru,)),
    Mutant("a victim's hashes stay", KVCacheManager, "withdraw", withdraw_nothing, (slots_under_priority,)),
    Mutant("a shared slot is overwritten", BlockTable, "needs_copy", never_copy, (slots, lattice, beams)),
    Mutant("a block is copied that was handed out since", PartialIndex, "forget", forget_nothing, (slots,)),
    Mutant("a copy never lets go of its ends", KVCacheManager, "release", release_nothing, (slots, lattice, beams)),
    Mutant("a preempted request takes its late token", scheduler, "is_stale", take_tokens_of_preempted, BOTH_AHEAD),
    Mutant("blocks are free while a step uses them", InFlight, "free", free_at_once, (ahead,)),
    Mutant("nobody waits for blocks on their way", InFlight, "keeps_blocks", property(wait_for_nothing), (ahead_long,)),
    Mutant("a length is known too late", scheduler, "runnable", forget_what_is_on_its_way, BOTH_AHEAD),
    Mutant("a row runs the token before", Row, "token_ids", property(run_the_token_before), BOTH_AHEAD),
    Mutant("a placeholder has a hash", KVCacheManager, "publish", publish_placeholders, (ahead,)),
    Mutant("beams run in part", scheduler, "runnable", run_beams_in_part, (slots,)),
    Mutant("a pruned beam keeps its blocks", Scheduler, "_fork_beams", fork_without_pruning, (slots, books, beams)),
    Mutant("a beam keeps its own tokens", Scheduler, "_fork_beams", fork_tables_but_not_tokens, (slots, beams)),
]

PAIRS = [pytest.param(m, check, id=f"{m.name}-{check.__name__}") for m in MUTANTS for check in m.caught_by]


@pytest.mark.parametrize(("mutant", "checker"), PAIRS)
def test_a_seeded_fault_is_found(mutant, checker, monkeypatch):
    monkeypatch.setattr(mutant.owner, mutant.function, mutant.replacement)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        checker()


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.caught_by == (reference_lru,)], ids=lambda m: m.name)
def test_eviction_order_is_invisible_to_the_tokens(mutant, monkeypatch):
    """Why eviction needs an oracle of its own: every answer is still right."""
    monkeypatch.setattr(mutant.owner, mutant.function, mutant.replacement)
    slots()
    books()

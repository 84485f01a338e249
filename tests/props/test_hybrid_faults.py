"""Seeded faults in windows and groups: each must be found, by the slots, by the text, or by the definition of a hit."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from minivllm.kv import hybrid
from minivllm.kv.hybrid import GroupManager, HybridKVCacheManager
from tests.props.test_lattice_hybrid import CELLS, run_hybrid_cell
from tests.walks import walk_windows


def slots() -> None:
    """Physical slots alone: the scheduler's own integrity check stays out."""
    for seed in range(60):
        walk_windows(seed, trust=True)


def books() -> None:
    """The manager's integrity check."""
    for seed in range(30):
        walk_windows(seed)


def lattice() -> None:
    """Cells in which windows let go, hits happen and memory is short."""
    for cell in (c for c in CELLS if c.caching and c.hybrid == "on" and c.mixed and c.tight and c.max_model_len == 48):
        run_hybrid_cell(cell)


@pytest.mark.parametrize("checker", [slots, books, lattice], ids=lambda checker: checker.__name__)
def test_the_unharmed_engine_passes(checker):
    checker()


def skip_one_token_more(num_computed, window, block_size):
    return max(num_computed - window + 2, 0) // block_size


def skip_one_block_more(num_computed, window, block_size):
    skipped = max(num_computed - window + 1, 0) // block_size
    return min(skipped + 1, num_computed // block_size)


def skip_nothing(num_computed, window, block_size):
    return 0


def hit_as_the_first_group(self, sequence, num_tokens):
    hashes = self.hashes(sequence)[: max(num_tokens - 1, 0) // self.block_size]
    hashes = hashes[: original_hit(hashes, self.groups[0].reach, self.groups[0])]
    return [block for group in self.groups for block in group.hit_blocks(hashes) or [self.pool.blocks[0]] * len(hashes)]


original_hit = hybrid.window_hit


def hit_from_the_front(hashes, needed, index):
    return next((i for i, block_hash in enumerate(hashes) if index.find(block_hash) is None), len(hashes))


def hit_with_one_block_less(hashes, needed, index):
    return original_hit(hashes, needed - 1 if 1 < needed < 1000 else needed, index)


def hashes_of_any_group(self, block_hash):
    copies = [self.pool.find(block_hash + bytes([number])) for number in range(2)]
    return next((block for block in copies if block is not None), None)


def allocate_group_by_group(self, sequence, num_new, hits=(), partial=None, *, watermark=False):
    for group, _ in self._shares(hits):
        group.remove_skipped(sequence)
    done = [group.allocate(sequence, num_new, share) for group, share in self._shares(hits)]
    return None if None in done else [pair for copies in done for pair in copies]


def free_the_first_group_only(self, sequence):
    self.groups[0].free(sequence)


@dataclass(frozen=True)
class Fault:
    """A fault, where it goes, and who must find it."""

    name: str
    owner: object
    function: str
    replacement: Callable
    caught_by: tuple[Callable[[], None], ...]


FAULTS = [
    Fault("a window is one token short", hybrid, "num_skipped", skip_one_token_more, (slots, lattice)),
    Fault("a block is freed too early", hybrid, "num_skipped", skip_one_block_more, (slots, lattice)),
    Fault("nothing is freed", hybrid, "num_skipped", skip_nothing, (slots, lattice)),
    Fault("a hit ignores the windows", HybridKVCacheManager, "lookup", hit_as_the_first_group, (slots, lattice)),
    Fault("a hit needs one block less", hybrid, "window_hit", hit_with_one_block_less, (slots,)),
    Fault("groups take each other's blocks", GroupManager, "find", hashes_of_any_group, (slots, lattice)),
    Fault("groups allocate one by one", HybridKVCacheManager, "allocate", allocate_group_by_group, (slots,)),
    Fault("one group's blocks are kept", HybridKVCacheManager, "free", free_the_first_group_only, (slots, books)),
]
PAIRS = [pytest.param(f, check, id=f"{f.name}-{check.__name__}") for f in FAULTS for check in f.caught_by]


@pytest.mark.parametrize(("fault", "checker"), PAIRS)
def test_a_seeded_fault_is_found(fault, checker, monkeypatch):
    monkeypatch.setattr(fault.owner, fault.function, fault.replacement)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        checker()


def test_a_hit_counted_from_the_front_is_only_too_short(monkeypatch):
    """Why `window_hit` needs an oracle of its own: whoever asks a window for all of a prefix still answers rightly."""
    monkeypatch.setattr(hybrid, "window_hit", hit_from_the_front)
    slots()

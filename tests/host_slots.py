"""Host memory of the physical slots: what moves, when it may, and what must be there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from minivllm.kv.offload import HostTier
from minivllm.plan import StepPlan

if TYPE_CHECKING:
    from tests.checked_scheduler import PhysicalSlots


def move_blocks(memory: PhysicalSlots, plan: StepPlan) -> None:
    """Out to host memory, and back; what comes back must be, position by position, what its row starts from."""
    size = memory.block_size
    for block, slot in plan.stores:
        memory.host[slot] = memory.slots[block * size : (block + 1) * size]
    for row in plan.rows:
        wanted = memory.prefixes(row.sequence.tokens(0, row.start))
        for slot, block in row.loads:
            assert slot in memory.host, f"host slot {slot} is read before anything was stored there"
            memory.slots[block * size : (block + 1) * size] = memory.host[slot]
            first = row.block_ids.index(block) * size
            assert first < row.start, "a block is loaded that the row computes"
            held = memory.host[slot][: row.start - first]
            assert held == wanted[first : first + size], f"{row.sequence} loads foreign KV at position {first}"


def check_moves(plan: StepPlan, flying: Iterable[StepPlan]) -> None:
    """A host slot that moves in a step on its way isn't written, and one that is being written isn't read."""
    written, read = [slot for _, slot in plan.stores], {slot for slot, _ in plan.loads}
    assert len(written) == len(set(written)), "a host slot is stored to twice in a step"
    assert not set(written) & read, "a host slot is read in the step that stores to it"
    for other in flying:
        stored, loaded = {slot for _, slot in other.stores}, {slot for slot, _ in other.loads}
        assert not set(written) & (stored | loaded), "a host slot is written while it moves"
        assert not read & stored, "a host slot is read before its store has completed"


def check_promises(memory: PhysicalSlots, tier: HostTier, meaning: Mapping[bytes, tuple[int, str]]) -> None:
    """The tier holds what it promises, and no more than there is room for. `meaning`: the prefix that a hash stands for."""
    assert len(tier.slots) <= tier.capacity
    for key, slot in tier.slots.items():
        if slot.ready and key in meaning:
            assert memory.host[slot.id][-1] == meaning[key][0], f"host slot {slot.id} lies"

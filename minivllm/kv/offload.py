"""A second tier for the prefix cache: blocks of KV kept in host memory, under the hashes they have on the device.

A full block is copied out once it's computed, not when it is evicted: it is safe before anybody wants its place, and an
eviction needs no copy. A prompt's lookup goes on in this tier where the device has no more; what it finds is copied back
into fresh blocks and counts as computed. Swapping a preempted request out (`preemption="swap"`) is the same and a bit
more: all it has computed is copied, its last, partly full block too, and stays put until the request comes back.

All copies of a step are in its plan. They run before its forward, stores first: whoever gets a stored block in that step
writes it after it was read. So a stored block needs no reference, as long as all of it was written before the plan runs.
Content can be found when its store has completed; who asks while it is on its way (`async_depth`) computes it again.

Bookkeeping only; the memory is in `runner/kv_cache.py`. On a CPU "device" and "host" are both RAM: what is saved is real
(tokens not computed again), what the copies cost is not what they cost over PCIe.

Source: vLLM 0.32 `v1/kv_offload/cpu/manager.py:CPUOffloadingManager` (states, pins, all or nothing); it copies beside the
forward and holds its blocks back for that, and it swaps no more: preempted requests just find what was stored. Swapping
goes back to the paper (Kwon et al. 2023, section 4.5).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

from minivllm.config import ConfigError, EngineConfig
from minivllm.kv.hybrid import ONE_GROUP, Windows
from minivllm.kv.manager import KVCacheManager
from minivllm.plan import Emit, EventKind, Row, StepPlan
from minivllm.request import Request, Sequence

Move = tuple[int, int]
"""A block copy between tiers: source, destination."""


@dataclass(slots=True)
class HostSlot:
    """Room for one block in host memory. `pins` count the loads that are planned from it, and the request it is kept for."""

    id: int
    ready: bool = False  # its store has run
    pins: int = 0

    @property
    def idle(self) -> bool:
        """Whether it may be given to other content."""
        return self.ready and not self.pins


class HostTier:
    """`capacity` slots; `slots[key]` is the one with this content, least recently used first; `free_ids` are never used ones."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: dict[bytes, HostSlot] = {}
        self.free_ids = list(reversed(range(capacity)))

    def find(self, key: bytes) -> HostSlot | None:
        """The slot that holds this content, or None: not there, or its store hasn't run yet. Changes nothing."""
        slot = self.slots.get(key)
        return slot if slot and slot.ready else None

    def store(self, keys: Seq[bytes]) -> dict[bytes, HostSlot] | None:
        """Slots, not ready, for those of `keys` that have none, at the expense of idle slots used least recently.

        All or nothing: None, with nothing changed, if idle slots don't suffice; those of `keys` themselves are spared.
        """
        wanted = dict.fromkeys(keys)
        missing = [key for key in wanted if key not in self.slots]
        num_evicted = max(len(missing) - len(self.free_ids), 0)
        idle = list(islice((k for k, slot in self.slots.items() if slot.idle and k not in wanted), num_evicted))
        if len(idle) < num_evicted:
            return None
        self.free_ids += [self.slots.pop(key).id for key in idle]
        fresh = {key: HostSlot(self.free_ids.pop()) for key in missing}
        self.slots |= fresh
        return fresh

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used now; the first of them counts as the latest. Unknown ones are ignored."""
        for key in reversed(list(keys)):
            if slot := self.slots.pop(key, None):
                self.slots[key] = slot

    def integrity(self) -> None:
        """Raise `AssertionError` unless every slot is in exactly one place."""
        ids = [slot.id for slot in self.slots.values()] + self.free_ids
        assert sorted(ids) == list(range(self.capacity)), "a host slot is lost or there twice"
        assert all(slot.pins >= 0 for slot in self.slots.values()), "a host slot is unpinned too often"


@dataclass(frozen=True, slots=True)
class HostHit:
    """What the host tier has of a sequence: the KV of `num_tokens` tokens in these slots, one after the other."""

    slots: tuple[HostSlot, ...] = ()
    num_tokens: int = 0


def pin(slots: Iterable[HostSlot], by: int) -> None:
    """Add `by`, 1 or -1, to the pins of each slot."""
    for slot in slots:
        slot.pins += by


@dataclass(slots=True)
class OffloadStats:
    """Blocks copied to host memory and back, tokens found there, requests swapped out."""

    stored: int = 0
    loaded: int = 0
    hits: int = 0
    swaps: int = 0


class Offload:
    """Which blocks move between the tiers: between the scheduler, a `KVCacheManager` and a `HostTier`.

    Without host blocks it does nothing, and every lookup finds nothing.
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager, windows: Windows, emit: Emit) -> None:
        if config.host_kv_blocks and windows != ONE_GROUP:
            fix = 'needs layers of one kind: set it to 0, or hybrid="off"'
            raise ConfigError("host_kv_blocks", config.host_kv_blocks, fix)
        self.tier = HostTier(config.host_kv_blocks)
        self.swaps = config.preemption == "swap"
        self._num_drafts = config.spec_tokens if config.spec_method != "none" else 0
        self.stats = OffloadStats()
        self.swapped: dict[int, HostHit] = {}  # by uid: everything that the sequence has computed
        self._stores: list[tuple[int, HostSlot]] = []  # for the next plan: device block and host slot
        self._moving: dict[int, tuple[list[HostSlot], list[HostSlot]]] = {}  # by step: being stored, being loaded
        self._loads: list[HostSlot] = []
        self._kv = kv
        self._emit = emit

    # out

    def store_computed(self, row: Row) -> None:
        """A row has run: copy the blocks that it filled to the host, or none of them if there is no room."""
        size, sequence = self._kv.block_size, row.sequence
        known = row.start - self._num_drafts  # drafts that held in the step before may have filled a block, too
        full = range(max(known, 0) // size, (row.stop - len(row.drafts)) // size)
        if not self.tier.capacity or not full:
            return
        hashes = self._kv.hashes(sequence)
        self._store({hashes[i]: row.block_ids[i] for i in full})
        self.tier.touch(hashes[: full.stop])

    def _store(self, blocks: dict[bytes, int]) -> bool:
        """Plan the copies of device blocks under their keys, those that are there already left out."""
        fresh = self.tier.store(list(blocks))
        if fresh:
            self._stores += [(blocks[key], slot) for key, slot in fresh.items()]
            self._emit(EventKind.STORED, blocks=tuple(blocks[key] for key in fresh))
        return fresh is not None

    def swap_out(self, request: Request, planned: Seq[Row]) -> str:
        """Keep in host memory all that a victim has computed, whose `planned` rows won't run. Says what was done, and why;
        "" if swapping is off.

        A block that was to be copied in one of the rows is empty now: such a victim isn't swapped.
        """
        if not self.swaps:
            return ""
        sequence = request.live[0]
        if len(request.live) > 1 or any(row.copies for row in planned) or not self._kv.reads_cache(sequence):
            return "recompute: several sequences, prompt logprobs, or a block still to be copied"
        keys = self._swap_keys(sequence)
        if not self._store(dict(zip(keys, self._kv.block_ids(sequence), strict=False))):
            return "recompute: the host tier is full"
        kept = tuple(self.tier.slots[key] for key in keys)
        pin(kept, 1)
        self.swapped[sequence.uid] = HostHit(kept, sequence.num_computed)
        self.tier.touch(keys)
        self.stats.swaps += 1
        return "swap"

    def _swap_keys(self, sequence: Sequence) -> list[bytes]:
        """A key for each block that has computed tokens: its hash; for a partly full last one, a key that nobody else has."""
        full, rest = divmod(sequence.num_computed, self._kv.block_size)
        last = f"{sequence.uid}/{sequence.num_computed}/{sequence.request.num_preemptions}".encode()
        return self._kv.hashes(sequence)[:full] + [last] * (rest > 0)

    # back

    def lookup(self, sequence: Sequence, num_hits: int, num_tokens: int) -> HostHit:
        """What the host has of the first `num_tokens - 1` tokens behind `num_hits` device blocks. No side effects.

        Whole blocks, as on the device; for a sequence that was swapped out its partly full block as well.
        """
        if not self.tier.slots or not self._kv.reads_cache(sequence):
            return HostHit()
        size, slots = self._kv.block_size, []
        for key in self._kv.hashes(sequence)[num_hits : max(num_tokens - 1, 0) // size]:
            if (slot := self.tier.find(key)) is None:
                break
            slots.append(slot)
        return self._with_last(sequence, num_hits, slots, num_tokens - 1)

    def _with_last(self, sequence: Sequence, num_hits: int, slots: list[HostSlot], limit: int) -> HostHit:
        """A hit on `slots`, and on the last block of what was swapped out if everything before it was found."""
        size, kept = self._kv.block_size, self.swapped.get(sequence.uid, HostHit())
        found, computed = num_hits + len(slots), min(kept.num_tokens, limit)
        if found == len(kept.slots) - 1 and kept.slots[-1].ready and computed > found * size:
            return HostHit((*slots, kept.slots[-1]), computed - num_hits * size)
        return HostHit(tuple(slots), len(slots) * size)

    def load(self, sequence: Sequence, num_hits: int, hit: HostHit) -> tuple[Move, ...]:
        """The sequence is admitted: the copies that fill its blocks behind `num_hits`. What was kept for it is let go."""
        self.forget(sequence)
        self.tier.touch(self._kv.hashes(sequence)[: num_hits + len(hit.slots)])
        if not hit.slots:
            return ()
        pin(hit.slots, 1)
        self._loads += hit.slots
        self.stats.hits += hit.num_tokens
        blocks = self._kv.block_ids(sequence)[num_hits : num_hits + len(hit.slots)]
        who = {"request": sequence.request.id, "sequence": sequence.index}
        self._emit(EventKind.LOADED, **who, blocks=tuple(blocks), tokens=hit.num_tokens)
        return tuple((slot.id, block) for slot, block in zip(hit.slots, blocks, strict=True))

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept any more for a sequence that was swapped out: it comes back, or never will."""
        pin(self.swapped.pop(sequence.uid, HostHit()).slots, -1)

    # the step

    def launch(self, plan: StepPlan) -> None:
        """Put the stores into a plan that will run. What isn't in one yet waits: nothing is written before it either."""
        plan.stores = [(block, slot.id) for block, slot in self._stores]
        self._moving[plan.step] = [slot for _, slot in self._stores], self._loads
        self._stores, self._loads = [], []

    def land(self, plan: StepPlan) -> None:
        """A step has completed: what it stored can be found, what it loaded may be evicted."""
        stored, loaded = self._moving.pop(plan.step)
        for slot in stored:
            slot.ready = True
        pin(loaded, -1)
        self.stats.stored += len(stored)
        self.stats.loaded += len(loaded)

    def reset(self) -> None:
        """Forget all content. Only while no step is on its way and no request waits."""
        self.tier, self._stores, self._loads = HostTier(self.tier.capacity), [], []

    def integrity(self) -> None:
        """Raise `AssertionError` unless every pin and every store that hasn't run is accounted for."""
        self.tier.integrity()
        loads = [slot for _, loaded in self._moving.values() for slot in loaded]
        kept = [slot for hit in self.swapped.values() for slot in hit.slots]
        assert sum(slot.pins for slot in self.tier.slots.values()) == len(loads) + len(kept), "pins"
        stores = [slot for stored, _ in self._moving.values() for slot in stored] + [slot for _, slot in self._stores]
        assert sum(not slot.ready for slot in self.tier.slots.values()) == len(stores), "stores"

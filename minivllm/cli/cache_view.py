"""What the scheduler and the KV cache hold at one moment, as numbers. No drawing here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minivllm.kv.manager import KVCacheManager
from minivllm.obs.timeline import sequence_name
from minivllm.request import Request
from minivllm.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class State:
    """Counts after a step. Blocks are held by someone, cached (free, but findable by their hash), or just free."""

    held: int
    cached: int
    free: int
    running: int
    waiting: int

    @property
    def usable(self) -> int:
        return self.held + self.cached + self.free


def state_of(scheduler: Scheduler) -> State:
    """Counts of a scheduler as it stands."""
    pool = scheduler.kv.pool
    cached = sum(block.ref_count == 0 and block.hash is not None for block in pool.blocks[1:])
    return State(
        held=pool.num_usable - pool.num_free,
        cached=cached,
        free=pool.num_free - cached,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
    )


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block as its holder sees it: who else holds it, and whether others can find it."""

    id: int
    holders: int
    published: bool


@dataclass(frozen=True, slots=True)
class TableView:
    """A sequence's block table at one moment."""

    name: str
    num_tokens: int
    blocks: tuple[BlockView, ...]


def tables_of(requests: Iterable[Request], kv: KVCacheManager) -> list[TableView]:
    """The block tables of requests that run; `num_tokens` are those with KV."""
    return [
        TableView(
            sequence_name(request.id, sequence.index),
            sequence.num_computed,
            tuple(BlockView(b.id, b.ref_count, b.hash is not None) for b in kv.tables[sequence.uid].blocks),
        )
        for request in requests
        for sequence in request.live
        if sequence.uid in kv.tables
    ]

"""The lattice with host memory behind the pool, victims swapped out or computed again: the same tokens, for less computing."""

from dataclasses import dataclass, replace

import pytest

from minivllm.kv.offload import OffloadStats
from minivllm.plan import EventKind
from tests.integer_model import IntegerModel
from tests.lattice import Cell, can_preempt, cells, make_scheduler, num_blocks, of, prove, refused, run, workload
from tests.props.test_lattice import EOS, VOCAB, expected
from tests.props.test_lattice_decoder import expected as decoder_expected
from tests.props.test_lattice_decoder import say


@dataclass(frozen=True, slots=True)
class OffloadCell(Cell):
    """A cell with `host` blocks of host memory (0: none), and one way to preempt."""

    host: int
    preemption: str
    depth: int = 0

    def __str__(self) -> str:
        return f"{Cell.__str__(self)}-host{self.host}-{self.preemption}" + "-ahead" * self.depth

    @property
    def config(self):
        changes = {"host_kv_blocks": self.host, "preemption": self.preemption, "async_depth": self.depth}
        return replace(Cell.config.fget(self), **changes)


def with_host(cell: Cell, *more: object) -> OffloadCell:
    return OffloadCell(*(getattr(cell, name) for name in Cell.__slots__), *more)


PLAIN = [c for c in cells() if c.caching and c.tight and c.max_model_len > 6 and not refused(c)]
WAYS = [(200, "recompute"), (200, "swap"), (6, "swap"), (200, "swap", 1)]
CELLS = [with_host(cell, *way) for cell in PLAIN for way in WAYS]


def run_offload_cell(cell: OffloadCell):
    requests = workload(cell.max_model_len, VOCAB, EOS)
    scheduler = make_scheduler(cell, requests, EOS)
    model = IntegerModel(num_blocks(cell, requests), cell.block_size, VOCAB)
    assert run(cell, scheduler, requests, model.execute) == expected(cell.max_model_len)
    return scheduler, requests


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_configuration_says_the_same_with_host_memory(cell):
    scheduler, requests = run_offload_cell(cell)
    events = list(scheduler.recorder.events)
    if cell.depth == 0:
        prove_moves(cell, events)
    if cell.host > 6 and cell.depth == 0 and cell.preemption == "recompute":
        prove(cell, requests, events)


def prove_moves(cell: OffloadCell, events) -> None:
    """Blocks are stored wherever one fills; a swap takes a preemption, and only one of a single sequence is swapped."""
    prompts = [len(r.prompt_token_ids) for r in workload(cell.max_model_len, VOCAB, EOS)]
    assert bool(of(events, EventKind.STORED)) or cell.block_size >= max(prompts) or cell.host == 6
    reasons = {event.reason.split(":")[0] for event in of(events, EventKind.PREEMPTED)}
    assert bool(reasons) == can_preempt(cell)
    assert reasons <= ({"swap", "recompute"} if cell.preemption == "swap" else {""})


def test_a_store_a_load_and_a_swap_do_happen():
    busy = [c for c in CELLS if c.mixed and c.budget > 1 and c.host > 6 and c.preemption == "swap" and c.chunked]
    totals = OffloadStats()
    for cell in busy:
        stats = run_offload_cell(cell)[0].offload.stats
        for name in OffloadStats.__slots__:
            setattr(totals, name, getattr(totals, name) + getattr(stats, name))
    assert totals.stored
    assert totals.loaded
    assert totals.hits
    assert totals.swaps


@pytest.mark.parametrize("cell", [c for c in PLAIN if can_preempt(c) and c.max_model_len == 48], ids=str)
def test_host_memory_never_leaves_more_to_compute_again_than_none(cell):
    again = [
        run_offload_cell(with_host(cell, *way))[0].in_flight.num_recomputed
        for way in ((0, "recompute"), (200, "recompute"), (200, "swap"))
    ]
    assert again == sorted(again, reverse=True)


DECODED = [
    OffloadCell(
        12, size, 7, caching=True, tight=True, mixed=mixed, chunked=True, policy="fcfs", host=host, preemption=way
    )
    for size in (1, 4)
    for mixed in (True, False)
    for host, way in ((0, "recompute"), (40, "recompute"), (40, "swap"), (3, "swap"))
]


@pytest.mark.parametrize("cell", DECODED, ids=str)
def test_a_decoder_says_the_same_with_host_memory(cell):
    assert say(cell, prove=lambda *_: None) == decoder_expected()


def load_the_wrong_slot(runner):
    load = runner.cache.load_blocks
    runner.cache.load_blocks = lambda pairs: load([((slot + 1) % 40, block) for slot, block in pairs])


def load_nothing(runner):
    runner.cache.load_blocks = lambda pairs: None


def store_after_the_forward(runner):
    """The block may belong to somebody else by then."""
    execute, store, late = runner.execute, runner.cache.store_blocks, []
    runner.cache.store_blocks = late.extend

    def run_it(plan):
        result = execute(plan)
        if late:
            store(late)
            late.clear()
        return result

    runner.execute = run_it


@pytest.mark.parametrize("fault", [load_the_wrong_slot, load_nothing, store_after_the_forward])
def test_a_seeded_fault_of_the_copies_changes_what_is_said(fault):
    try:
        said = [say(cell, spoil=fault, prove=lambda *_: None) for cell in DECODED if cell.host == 40]
    except AssertionError as verdict:
        said = [str(verdict)]
    assert any(answer != decoder_expected() for answer in said)

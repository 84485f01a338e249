"""The lattice with steps planned ahead: the same tokens, and only what a stop made useless is run for nothing."""

from dataclasses import replace
from functools import cache

import pytest

from minivllm.plan import EventKind, TraceEvent
from minivllm.request import FinishReason, Request
from tests.integer_model import IntegerModel, plain_tokens
from tests.lattice import (
    Cell,
    cells,
    make_scheduler,
    num_blocks,
    of,
    prove_cache,
    prove_chunks,
    prove_forks,
    refused,
    run,
    workload,
)
from tests.props import test_lattice_beams as beams
from tests.props import test_lattice_decoder as decoder
from tests.props.test_lattice import VOCAB


class AsyncCell(Cell):
    """A cell with the switch on."""

    @property
    def config(self):
        return replace(super().config, async_depth=1)


def ahead(cell: Cell) -> AsyncCell:
    return AsyncCell(*(getattr(cell, name) for name in Cell.__slots__))


CELLS = [ahead(cell) for cell in cells() if not refused(cell)]


@cache
def workload_that_stops(max_model_len: int):
    """An end-of-sequence token that somebody draws before the last step, and what the plain loop says with it."""
    for eos in range(VOCAB):
        requests = workload(max_model_len, VOCAB, eos)
        said = {(r.id, s.index): plain_tokens(r, s.index, VOCAB, eos) for r in requests for s in r.sequences}
        if any(len(said[r.id, 0]) < r.max_tokens for r in requests):
            return eos, said
    raise AssertionError("nobody stops")


def run_cell(cell: Cell) -> list[TraceEvent]:
    """One cell: its tokens are those of the plain loop, and its trace proves what it stands for."""
    eos, expected = workload_that_stops(cell.max_model_len)
    requests = workload(cell.max_model_len, VOCAB, eos)
    scheduler = make_scheduler(cell, requests, eos)
    model = IntegerModel(num_blocks(cell, requests), cell.block_size, VOCAB)
    assert run(cell, scheduler, requests, model.execute) == expected
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    events = list(scheduler.recorder.events)
    prove(cell, requests, events)
    return events


def prove(cell: Cell, requests: list[Request], events: list[TraceEvent]) -> None:
    """Steps were planned ahead, and what ran for nothing is one token for each stop at most, and for no end by length."""
    prove_cache(cell, requests, events)
    prove_chunks(cell, requests, events)
    prove_forks(cell, requests, events)
    assert any(e.start < e.step for e in of(events, EventKind.COMPLETED)), "no step was planned ahead"
    wasted = [e for e in of(events, EventKind.DROPPED) if e.reason == "finished"]
    stopped = [s for r in requests for s in r.sequences if s.finish_reason is FinishReason.STOP]
    early = [s for s in stopped if len(s.output_token_ids) < s.request.max_tokens]
    assert all(e.tokens == 1 for e in wasted)
    assert {(e.request, e.sequence) for e in wasted} <= {(s.request.id, s.index) for s in early}
    assert len(wasted) == len(early) or cell.tight or cell.budget == 1, "a stop cost less or more than one slot"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_configuration_says_the_same_with_steps_planned_ahead(cell):
    run_cell(cell)


def test_tokens_are_dropped_for_a_stop_and_for_a_preemption():
    events = [e for c in CELLS if c.tight and c.mixed and c.budget == 64 for e in run_cell(c)]
    assert {e.reason for e in of(events, EventKind.DROPPED)} == {"finished", "preempted"}


@pytest.mark.parametrize("cell", [ahead(cell) for cell in decoder.CELLS], ids=str)
def test_a_decoder_says_the_same_with_steps_planned_ahead(cell):
    assert decoder.say(cell, prove=prove) == decoder.expected()


@pytest.mark.parametrize("cell", [ahead(cell) for cell in beams.CELLS][::3], ids=str)
def test_a_search_finds_the_same_beside_requests_that_are_planned_ahead(cell):
    beams.check_search(cell)

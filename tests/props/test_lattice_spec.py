"""The lattice with proposed tokens, right ones and wrong ones: the same text, and the trace proves that both occurred."""

from dataclasses import replace

import pytest

from minivllm.config import EngineConfig
from minivllm.kv.manager import KVCacheManager
from minivllm.plan import EventKind, TraceEvent
from minivllm.request import Request
from minivllm.sample import spec
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import Recorder, TraceHeader, replay
from tests.builders import make_request
from tests.integer_model import IntegerModel, plain_tokens
from tests.lattice import (
    Cell,
    Tokens,
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
from tests.props import test_lattice_decoder as decoder
from tests.props.test_lattice import VOCAB
from tests.props.test_lattice_async import workload_that_stops

K = 3


class SpecCell(Cell):
    """A cell with the switch on."""

    @property
    def config(self) -> EngineConfig:
        return replace(super().config, spec_method="ngram", spec_tokens=K)


def speculating(cell: Cell) -> SpecCell:
    return SpecCell(*(getattr(cell, name) for name in Cell.__slots__))


CELLS = [speculating(cell) for cell in cells() if not refused(cell)]
BUSY = [c for c in CELLS if c.caching and c.tight and c.mixed and c.chunked and c.max_model_len == 48 and c.budget > 1]


def half_right(truth: Tokens):
    """Proposes what comes, but for each third token of an answer something else."""

    def propose(scheduler: Scheduler) -> None:
        for sequence in scheduler.decoding():
            begin = len(sequence.output_token_ids)
            coming = enumerate(truth[sequence.request.id, sequence.index][begin : begin + K], begin)
            scheduler.propose(sequence, [(token + (place % 3 == 2)) % VOCAB for place, token in coming])

    return propose


def run_cell(cell: Cell) -> list[TraceEvent]:
    eos, expected = workload_that_stops(cell.max_model_len)
    requests = workload(cell.max_model_len, VOCAB, eos)
    scheduler = make_scheduler(cell, requests, eos)
    model = IntegerModel(num_blocks(cell, requests), cell.block_size, VOCAB)
    assert run(cell, scheduler, requests, model.execute, propose=half_right(expected)) == expected
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    events = list(scheduler.recorder.events)
    prove(cell, requests, events)
    header = TraceHeader(cell.config, num_blocks(cell, requests), cell.max_model_len, (eos,), cell.groups)
    assert [*replay(header, events)], "the trace alone leads through the same decisions"
    return events


def prove(cell: Cell, requests: list[Request], events: list[TraceEvent]) -> None:
    """Drafts were run, some of them right and some wrong, wherever a step has room for more than one token.

    The shortest requests in a tight pool are preempted before it comes to more than one draft, and then find their own blocks.
    """
    short = cell.tight and cell.max_model_len == 6
    if not short:
        prove_cache(cell, requests, events)
    prove_chunks(cell, requests, events)
    prove_forks(cell, requests, events)
    run_ = sum(r.num_drafts for r in requests)
    right = sum(r.num_accepted for r in requests)
    assert right == sum(e.tokens for e in of(events, EventKind.ACCEPTED))
    assert (0 < right < run_) == (cell.budget > 1) or short, f"{right} of {run_} drafts were right"
    assert run_ <= sum(e.tokens for e in of(events, EventKind.PROPOSED))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_configuration_says_the_same_with_proposed_tokens(cell):
    run_cell(cell)


def test_requests_with_drafts_are_preempted_hit_and_copied():
    kinds = {event.kind for cell in BUSY for event in run_cell(cell)}
    assert kinds >= {EventKind.PREEMPTED, EventKind.HIT, EventKind.COPIED, EventKind.EVICTED}


@pytest.mark.parametrize("cell", [speculating(cell) for cell in decoder.CELLS], ids=str)
def test_a_decoder_says_the_same_with_proposed_tokens(cell):
    assert decoder.say(cell, prove=prove, propose=half_right(decoder.expected())) == decoder.expected()


# faults


def ask_for_what_was_wrongly_proposed() -> None:
    """A prompt that goes on as a refused proposal did: nothing that was computed for that may be found in the cache."""
    config = EngineConfig(block_size=2, spec_method="ngram", spec_tokens=5)
    scheduler = Scheduler(config, 33, 32, (), Recorder(keep=None))
    model = IntegerModel(33, 2, VOCAB)
    first = make_request("first", [1, 2, 3], 8)
    wrong: list[int] = []

    def propose(scheduler: Scheduler) -> None:
        for sequence in scheduler.decoding():
            if not wrong:
                said = sequence.output_token_ids
                wrong.extend([*said, *((token + 1) % VOCAB for token in plain_tokens(first, 0, VOCAB, -1)[1:6])])
                scheduler.propose(sequence, wrong[1:])

    def check(request: Request) -> None:
        scheduler.add(request)
        while scheduler.has_requests:
            propose(scheduler)
            plan = scheduler.schedule()
            scheduler.update(plan, model.execute(plan))
        assert request.sequences[0].output_token_ids == plain_tokens(request, 0, VOCAB, -1)

    check(first)
    check(make_request("second", [1, 2, 3, *wrong, 4], 6))


def lattice_with_drafts() -> None:
    for cell in BUSY:
        run_cell(cell)


def accept_all(drafts, drawn):
    return len(drafts)


def publish_drafts(self, sequence, num_tokens):
    known = sequence.output_token_ids
    sequence.output_token_ids = known + sequence.drafts
    original_publish(self, sequence, num_tokens)
    sequence.output_token_ids = known


original_publish = KVCacheManager.publish


def keep_the_count(self, row, num_accepted):
    """The rejected ones stay computed."""
    row.sequence.num_computed = row.stop if not row.sequence.finished else row.sequence.num_computed


FAULTS = [
    pytest.param(spec, "num_matching", accept_all, lattice_with_drafts, id="every draft is accepted"),
    pytest.param(KVCacheManager, "publish", publish_drafts, ask_for_what_was_wrongly_proposed, id="drafts have hashes"),
    pytest.param(Scheduler, "_count_drafts", keep_the_count, lattice_with_drafts, id="nothing is rolled back"),
]


@pytest.mark.parametrize(("owner", "function", "replacement", "checker"), FAULTS)
def test_a_seeded_fault_is_found(owner, function, replacement, checker, monkeypatch):
    checker()
    monkeypatch.setattr(owner, function, replacement)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        checker()

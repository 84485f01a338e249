"""The lattice with hits that end inside a block: the same tokens, for less computing."""

from dataclasses import replace

import pytest

from minivllm.plan import EventKind
from tests.integer_model import IntegerModel
from tests.lattice import Cell, cells, make_scheduler, num_blocks, of, refused, run, workload
from tests.props.test_lattice import EOS, VOCAB, expected


class PartialCell(Cell):
    """A cell with the switch on."""

    @property
    def config(self):
        return replace(super().config, partial_block_hits=True)


CELLS = [
    PartialCell(*(getattr(cell, name) for name in Cell.__slots__))
    for cell in cells()
    if not refused(cell) and cell.caching and cell.block_size > 1 and cell.max_model_len > 6
]


def events_of(cell: Cell):
    requests = workload(cell.max_model_len, VOCAB, EOS)
    scheduler = make_scheduler(cell, requests, EOS)
    model = IntegerModel(num_blocks(cell, requests), cell.block_size, VOCAB)
    assert run(cell, scheduler, requests, model.execute) == expected(cell.max_model_len)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    return requests, list(scheduler.recorder.events)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_configuration_says_the_same_with_partial_hits(cell):
    _, events = events_of(cell)
    inside = [e for e in of(events, EventKind.HIT) if e.tokens % cell.block_size]
    # alone and in a roomy pool, the prompt that is asked twice hits all but its last token
    assert inside or cell.tight or cell.mixed


@pytest.mark.parametrize("cell", [c for c in CELLS if not c.tight and not c.mixed and c.policy == "fcfs"], ids=str)
def test_partial_hits_leave_less_to_compute(cell):
    whole = Cell(*(getattr(cell, name) for name in Cell.__slots__))
    ran = [sum(e.tokens for e in of(events_of(c)[1], EventKind.SCHEDULED)) for c in (cell, whole)]
    assert ran[0] < ran[1]


def test_partial_hits_do_happen_in_mixed_batches_too():
    some = [c for c in CELLS if c.mixed and c.tight][::4]
    assert any(e.tokens % c.block_size for c in some for e in of(events_of(c)[1], EventKind.HIT))

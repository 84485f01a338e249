"""Same tokens under every configuration: the full lattice on the integer model."""

from functools import cache

import pytest

from minivllm.config import ConfigError
from tests.integer_model import IntegerModel, plain_tokens
from tests.lattice import LENGTHS, Cell, cells, make_scheduler, num_blocks, prove, refused, run, workload

VOCAB, EOS = 50, 0

RUN = [cell for cell in cells() if not refused(cell)]
REFUSED = [cell for cell in cells() if refused(cell)]


@cache
def expected(max_model_len: int) -> dict[tuple[str, int], list[int]]:
    """What the plain loop says to the workload."""
    requests = workload(max_model_len, VOCAB, EOS)
    return {(r.id, s.index): plain_tokens(r, s.index, VOCAB, EOS) for r in requests for s in r.sequences}


def run_cell(cell: Cell) -> None:
    """One cell: its tokens are those of the plain loop, and its trace proves what the cell stands for."""
    requests = workload(cell.max_model_len, VOCAB, EOS)
    scheduler = make_scheduler(cell, requests, EOS)
    model = IntegerModel(num_blocks(cell, requests), cell.block_size, VOCAB)
    said = run(cell, scheduler, requests, model.execute)
    assert said == expected(cell.max_model_len), "the configuration changed what is said"
    prove(cell, requests, list(scheduler.recorder.events))


@pytest.mark.parametrize("cell", RUN, ids=str)
def test_every_configuration_says_the_same(cell):
    run_cell(cell)


def test_cells_are_left_out_only_where_the_engine_refuses():
    for cell in REFUSED:
        with pytest.raises(ConfigError, match="max_num_batched_tokens"):
            make_scheduler(cell, workload(cell.max_model_len, VOCAB, EOS), EOS)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("position", range(6))
def test_one_wrong_slot_changes_what_is_said(layer, position):
    cell = Cell(12, 4, 64, caching=True, tight=True, mixed=False, chunked=True, policy="fcfs")
    request = workload(cell.max_model_len, VOCAB, EOS)[0]
    scheduler = make_scheduler(cell, [request], EOS)
    model = IntegerModel(num_blocks(cell, [request]), cell.block_size, VOCAB)

    def execute(plan):
        (row,) = plan.rows
        if row.start == len(request.prompt_token_ids):
            model.layers[layer][row.block_ids[position // 4] * 4 + position % 4] += 1
        return model.execute(plan)

    said = run(cell, scheduler, [request], execute)
    assert said[request.id, 0][:1] == expected(cell.max_model_len)[request.id, 0][:1]
    assert said[request.id, 0] != expected(cell.max_model_len)[request.id, 0]


@pytest.mark.parametrize("max_model_len", LENGTHS)
def test_the_workload_tells_requests_siblings_and_ends_apart(max_model_len):
    said = expected(max_model_len)
    assert said["first", 0] == said["again", 0]
    assert said["forked", 0] != said["forked", 1]
    assert len({tuple(tokens) for tokens in said.values()}) == len(said) - 1


def test_the_lattice_has_at_least_200_cells():
    assert len(RUN) >= 200
    assert len(RUN) + len(REFUSED) == len(set(cells())) == 864

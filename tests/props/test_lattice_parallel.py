"""The lattice with the layers split over ranks: each keeps its own KV, all run the same plans, and the tokens are the same."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from minivllm.models.decoder import Decoder
from minivllm.models.shards import make_shard
from minivllm.plan import EventKind
from minivllm.runner.model_runner import ModelRunner
from minivllm.runner.parallel import RowParallelLinear
from tests.lattice import Cell, of
from tests.props.test_lattice_async import ahead
from tests.props.test_lattice_async import prove as prove_ahead
from tests.props.test_lattice_decoder import (
    CELLS,
    LENGTH,
    MODEL,
    expected,
    forget_copies,
    overwrite_a_slot,
    say,
    weights_of,
)
from tests.props.test_lattice_offload import with_host
from tests.props.test_lattice_spec import half_right, speculating
from tests.props.test_lattice_spec import prove as prove_drafts
from tests.thread_group import ThreadGroup

BUSY = Cell(LENGTH, 4, 7, caching=True, tight=True, mixed=True, chunked=True, policy="fcfs")
SOME = [cell for cell in CELLS if cell.budget == 7 and cell.block_size < 16]


def split(lead: ModelRunner, size: int, cell: Cell, spoil: Callable[[ModelRunner], None]) -> None:
    """Let `size` ranks run what one runner was made for, told what `engine/procs.py:LeadRunner` tells them."""
    group = ThreadGroup(size)

    def make_runner(rank: int) -> ModelRunner:
        shard = make_shard(MODEL, rank, size)
        part = {name: shard.cut(name, weight) for name, weight in weights_of(MODEL).items()}
        row_linear = partial(RowParallelLinear, all_reduce=partial(group.all_reduce, rank))
        decoder = Decoder(shard.config, part, dtype=torch.float64, device="cpu", row_linear=row_linear)
        return ModelRunner(decoder, cell.config, lead.cache.num_slots // lead.block_size)

    runners = [make_runner(rank) for rank in range(size)]
    spoil(runners[-1])

    def execute(plan):
        batches = lead.input_batches(plan, "cpu")
        said = [batches, *[[batch.without_logits() for batch in batches]] * (size - 1)]
        return group.run(lambda rank, _: runners[rank].run(plan.moves, said[rank]))[0]

    lead.execute = execute


def say_together(size: int, cell: Cell, spoil: Callable[[ModelRunner], None] = lambda runner: None, **how):
    """What the workload is told by a decoder on so many ranks, the last of which may be faulty."""
    return say(cell, spoil=lambda runner: split(runner, size, cell, spoil), **how)


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_two_ranks_say_what_one_says(cell):
    assert say_together(2, cell) == expected()


@pytest.mark.parametrize("size", [4, 6])
def test_more_ranks_than_kv_heads_say_so_too(size):
    assert say_together(size, BUSY) == expected()


def test_ranks_say_the_same_to_steps_that_are_planned_ahead():
    assert say_together(2, ahead(BUSY), prove=prove_ahead) == expected()


def test_ranks_say_the_same_with_proposed_tokens():
    propose = half_right(expected())
    assert say_together(2, speculating(BUSY), prove=prove_drafts, propose=propose) == expected()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_ranks_say_the_same_with_host_memory(preemption):
    seen = []
    cell = with_host(BUSY, 40, preemption)
    assert say_together(2, cell, prove=lambda *proof: seen.extend(proof[2])) == expected()
    assert of(seen, EventKind.STORED)


@pytest.mark.parametrize("fault", [forget_copies, overwrite_a_slot])
def test_a_fault_of_one_rank_changes_what_is_said(fault):
    try:
        said = say_together(2, BUSY, fault)
    except AssertionError as verdict:
        said = str(verdict)
    assert said != expected()

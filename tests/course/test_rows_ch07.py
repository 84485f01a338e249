"""Chapter 7: the numbers of row A15, beam search over a paged cache, out of the allocator: no model is needed."""

import pytest

from minivllm.calc.hw import MIB
from minivllm.calc.memory import beam_blocks, block_bytes
from minivllm.calc.models import LLAMA_3_8B
from minivllm.course.drive import ask, make_scheduler, step
from minivllm.request import BeamParams, Request, SampledToken
from minivllm.sched.scheduler import Scheduler

WIDTH, PROMPT, LENGTH = 4, 1_000, 1_200
BLOCK = block_bytes(LLAMA_3_8B)


def mib(blocks: int) -> float:
    return blocks * BLOCK / MIB


def search(scheduler: Scheduler, *, from_one_parent: bool) -> Request:
    """Four beams, until 1,200 tokens of each have KV: every step all continue the first, or each continues itself."""
    beams = BeamParams(WIDTH, LENGTH - PROMPT + 1, ignore_eos=True)
    request = Request("beams", list(range(PROMPT)), beams.sampling, max_tokens=beams.max_tokens, beams=beams)
    scheduler.add(request)
    while request.sequences[0].num_computed < LENGTH:
        plan = scheduler.schedule()
        if request.sequences[0].num_computed == LENGTH:
            break
        scheduler.update(plan, [draw(row, from_one_parent) for row in plan.rows if row.samples])
    return request


def draw(row, from_one_parent: bool) -> list[SampledToken]:
    forks = from_one_parent and row.sequence.output_token_ids and row.sequence.index
    return [SampledToken(5_000 + s.index, parent=0 if forks else None) for s in row.samples]


def engine(num_blocks: int) -> Scheduler:
    return make_scheduler(num_blocks + 1, max_model_len=LENGTH + 1)


def held(scheduler: Scheduler) -> int:
    return scheduler.kv.pool.num_usable - scheduler.kv.pool.num_free


def test_row_A15_a_block_of_the_8B_model_is_2_MiB():
    assert BLOCK == 2 * MIB


def test_row_A15_separate_caches_hold_300_blocks_600_MiB():
    scheduler = make_scheduler(
        302, max_model_len=LENGTH + 1, max_num_batched_tokens=WIDTH * PROMPT, enable_prefix_caching=False
    )
    for number in range(WIDTH):
        ask(scheduler, f"alone {number}", list(range(PROMPT)), max_tokens=LENGTH - PROMPT + 1)
    for _ in range(LENGTH - PROMPT):
        step(scheduler)
    scheduler.schedule()
    assert held(scheduler) == beam_blocks(WIDTH, LENGTH, shared=0) == 300
    assert mib(held(scheduler)) == 600


def test_row_A15_beams_of_one_parent_hold_78_blocks_156_MiB():
    scheduler = engine(120)
    request = search(scheduler, from_one_parent=True)
    assert held(scheduler) == beam_blocks(WIDTH, LENGTH, shared=LENGTH - 1) == 78
    assert mib(held(scheduler)) == 156
    assert request.peak_blocks == (78, 300)


def test_row_A15_beams_that_split_after_the_prompt_hold_114_blocks_228_MiB():
    scheduler = engine(120)
    request = search(scheduler, from_one_parent=False)
    assert held(scheduler) == beam_blocks(WIDTH, LENGTH, shared=PROMPT) == 114
    assert mib(held(scheduler)) == 228
    assert request.peak_blocks == (114, 300)


def test_row_A15_a_step_copies_at_most_one_tail_fewer_than_there_are_beams():
    scheduler = engine(120)
    search(scheduler, from_one_parent=True)
    copied: dict[int, int] = {}
    for event in scheduler.recorder.events:
        if event.kind == "copied":
            copied[event.step] = copied.get(event.step, 0) + 1
    assert set(copied.values()) == {WIDTH - 1}


@pytest.mark.parametrize(("shared", "blocks"), [(0, 300), (PROMPT, 114), (LENGTH - 1, 78)])
def test_row_A15_the_formula_gives_what_the_allocator_holds(shared, blocks):
    assert beam_blocks(WIDTH, LENGTH, shared) == blocks

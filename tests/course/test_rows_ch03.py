"""Chapter 3: the numbers and invariants of its rows, B1 (paging) and A29 (what it wastes)."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from lessons.naive import NaiveCache
from minivllm.calc.hw import MIB
from minivllm.calc.memory import (
    blocks_for,
    expected_waste_share,
    lognormal_lengths,
    paged_use,
    paged_waste,
    reserved_use,
)
from minivllm.calc.models import LLAMA_3_8B
from minivllm.config import EngineConfig, ModelConfig
from minivllm.course.drive import ask, make_scheduler, run, step
from minivllm.kv.block_pool import BlockPool, OutOfBlocks
from minivllm.models.decoder import Decoder
from minivllm.plan import Row, StepPlan
from minivllm.request import Request, SamplingParams
from minivllm.runner.model_runner import ModelRunner
from tests.random_weights import random_weights

lengths = st.lists(st.integers(0, 300), max_size=30)

TINY = ModelConfig("llama", 64, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=64)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    weights = random_weights(TINY, dtype=torch.float64)
    return Decoder(TINY, weights, dtype=torch.float64, device="cpu")


# B1


def test_row_B1_reservation_uses_a_sixth_and_paging_nearly_all():
    lens = lognormal_lengths()
    assert sum(lens) / len(lens) == pytest.approx(342, abs=1)
    assert reserved_use(lens, 2048) == pytest.approx(0.167, abs=0.0005)
    assert paged_use(lens, 16) == pytest.approx(0.979, abs=0.0005)
    assert paged_use(lens, 16) / reserved_use(lens, 2048) == pytest.approx(5.9, abs=0.05)


def logits(runner: ModelRunner, ids: list[int], table: list[int]) -> torch.Tensor:
    sequence = Request("x", ids, SamplingParams(), max_tokens=1).sequences[0]
    return runner.execute(StepPlan(1, [Row(sequence, 0, len(ids), table, (sequence,))])).logits[0]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_row_B1_logits_from_any_blocks_are_those_of_memory_in_one_piece(decoder: Decoder, backend):
    ids = list(range(3, 24))
    runner = ModelRunner(decoder, EngineConfig(block_size=4, dtype="float64", attention_backend=backend), 16)
    in_order, scattered = logits(runner, ids, [1, 2, 3, 4, 5, 6]), logits(runner, ids, [9, 2, 15, 7, 1, 4])
    assert torch.equal(in_order, scattered)
    with torch.inference_mode():
        hidden = decoder.forward(torch.tensor(ids), torch.arange(len(ids)), NaiveCache())
        contiguous = decoder.logits(hidden[-1:])[0]
    torch.testing.assert_close(in_order, contiguous, atol=1e-8, rtol=1e-8, check_dtype=False)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 5))
def test_row_B1_a_table_has_one_block_for_each_started_block_of_tokens_and_all_come_back(prompts, new):
    scheduler = make_scheduler(num_blocks=50, block_size=4)
    for i, length in enumerate(prompts):
        ask(scheduler, f"r{i}", [100 * i + j for j in range(length)], max_tokens=new)
    while scheduler.has_requests:
        step(scheduler)
        for request in scheduler.running:
            sequence = request.sequences[0]
            assert len(scheduler.kv.block_ids(sequence)) == blocks_for(sequence.num_computed, 4)
        scheduler.integrity()
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


def test_row_B1_no_block_stands_in_two_tables_unless_it_is_counted_twice():
    scheduler = make_scheduler(num_blocks=30, block_size=4)
    requests = [ask(scheduler, name, range(10), max_tokens=4) for name in "AB"]
    step(scheduler)
    first, second = (set(scheduler.kv.block_ids(request.sequences[0])) for request in requests)
    assert {scheduler.kv.pool.blocks[i].ref_count for i in first & second} == {2}
    assert {scheduler.kv.pool.blocks[i].ref_count for i in first ^ second} == {1}
    run(scheduler)


def test_row_B1_allocation_is_all_or_nothing_a_double_free_changes_nothing_and_block_0_is_never_given():
    pool = BlockPool(4)
    held = pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert pool.num_free == 1
    with pytest.raises(ValueError, match="more often"):
        pool.free([held[0], held[0]])
    assert [block.ref_count for block in held] == [1, 1]
    assert 0 not in {block.id for block in [*held, *pool.allocate(1)]}
    pool.integrity()


# A29

SHARES = [(1, 0.0), (8, 0.7), (16, 1.4), (32, 2.9), (64, 5.8), (128, 11.0), (256, 19.9)]


@pytest.mark.parametrize(("block_size", "percent"), SHARES)
def test_row_A29_expected_waste_at_a_mean_of_512_tokens(block_size, percent):
    assert round(100 * expected_waste_share(512, block_size), 1) == percent


def test_row_A29_the_worst_case_of_llama_3_8b_in_bytes():
    token = LLAMA_3_8B.kv_bytes_per_token()
    assert paged_waste([1], 16) * token == 1.875 * MIB
    assert paged_waste([17] * 256, 16) * token == 480 * MIB


@given(lengths, st.integers(1, 64))
def test_row_A29_at_most_block_size_less_one_slots_a_sequence(lens, block_size):
    assert 0 <= paged_waste(lens, block_size) <= (block_size - 1) * len(lens)


@given(st.lists(st.integers(0, 20), min_size=1), st.integers(1, 64))
def test_row_A29_the_bound_is_reached_where_the_last_block_holds_one_token(full_blocks, block_size):
    lens = [n * block_size + 1 for n in full_blocks]
    assert paged_waste(lens, block_size) == (block_size - 1) * len(lens)


@given(lengths, st.integers(1, 32))
def test_row_A29_half_the_block_size_never_wastes_more(lens, half):
    assert paged_waste(lens, half) <= paged_waste(lens, 2 * half)
    assert paged_waste(lens, 1) == 0


@given(st.integers(1, 200), st.sampled_from([4, 8, 16]))
def test_row_A29_a_shared_prefix_is_matched_in_whole_blocks(shared, block_size):
    scheduler = make_scheduler(num_blocks=120, block_size=block_size)
    ask(scheduler, "first", [*range(shared), 1_001, 1_002])
    run(scheduler)
    second = ask(scheduler, "second", [*range(shared), 2_001, 2_002])
    run(scheduler)
    assert second.num_cached_tokens == shared // block_size * block_size

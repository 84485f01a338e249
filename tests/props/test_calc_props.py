"""Bounds keep their order and their limits, whatever the machine, the model or the traffic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.calc import memory, roofline
from minivllm.calc.hw import GIB, H100
from minivllm.calc.models import LLAMA_3_8B, SHAPES

sizes = st.floats(1e6, 1e13)
lengths = st.lists(st.integers(0, 5000), max_size=30)
block_sizes = st.integers(1, 300)


@given(sizes, sizes, st.floats(0.1, 10))
def test_tokens_a_second_are_proportional_to_bandwidth(bandwidth, model, factor):
    assert roofline.decode_tps(factor * bandwidth, model) == pytest.approx(
        factor * roofline.decode_tps(bandwidth, model)
    )


@given(sizes, st.floats(0, 1e13), sizes, sizes)
def test_spilled_speed_lies_between_the_two_memories_alone(model, room, gpu, host):
    ends = [roofline.decode_tps(bandwidth, model) for bandwidth in (gpu, host)]
    tps = roofline.spill_tps(model, room, gpu, host)
    assert min(ends) * (1 - 1e-9) <= tps <= max(ends) * (1 + 1e-9)


@given(sizes, st.floats(0, 1), st.floats(0, 1), sizes, st.floats(0.01, 1))
def test_more_room_on_the_faster_memory_never_slows_down(model, share, more, gpu, slower):
    rooms = sorted([share * model, more * model])
    tps = [roofline.spill_tps(model, room, gpu, slower * gpu) for room in rooms]
    assert tps[0] <= tps[1] * (1 + 1e-9)


@given(sizes, st.floats(0, 1), st.floats(0.01, 1), sizes, sizes)
def test_a_mixture_gains_what_it_does_not_read(model, room, active, gpu, host):
    dense = roofline.spill_tps(model, room * model, gpu, host)
    sparse = roofline.spill_tps(model, room * model, gpu, host, active_bytes=active * model)
    assert sparse == pytest.approx(dense / active)


@given(st.sampled_from(SHAPES), st.integers(1, 2000), st.integers(0, 8192))
def test_a_larger_batch_helps_the_fleet_and_never_the_user(shape, batch, context):
    small, large = (roofline.decode_step(shape, H100, size, context) for size in (batch, batch + 1))
    assert large.tokens_per_s >= small.tokens_per_s * (1 - 1e-9)
    assert large.tokens_per_s_per_user <= small.tokens_per_s_per_user * (1 + 1e-9)


@given(st.sampled_from(SHAPES), st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_attention_counts_the_same_however_a_prompt_is_cut(shape, chunks):
    whole = roofline.attention_flops(shape, sum(chunks))
    parts = sum(roofline.attention_flops(shape, n, context=sum(chunks[:i])) for i, n in enumerate(chunks))
    assert parts == pytest.approx(whole)


@given(lengths, block_sizes)
def test_waste_is_at_most_a_block_less_one_slot_for_each_sequence(lens, block_size):
    assert 0 <= memory.paged_waste(lens, block_size) <= (block_size - 1) * len(lens)


@given(st.lists(st.integers(0, 100), max_size=20), block_sizes)
def test_the_bound_is_met_when_every_sequence_has_one_token_in_its_last_block(blocks, block_size):
    lens = [full * block_size + 1 for full in blocks]
    assert memory.paged_waste(lens, block_size) == (block_size - 1) * len(lens)


@given(lengths)
def test_blocks_of_one_token_waste_nothing(lens):
    assert memory.paged_waste(lens, 1) == 0


@given(lengths, st.integers(1, 128))
def test_halving_the_block_never_wastes_more(lens, half):
    assert memory.paged_waste(lens, half) <= memory.paged_waste(lens, 2 * half)


@given(lengths, block_sizes)
def test_used_and_wasted_slots_make_whole_blocks(lens, block_size):
    slots = sum(lens) + memory.paged_waste(lens, block_size)
    assert slots == block_size * sum(memory.blocks_for(length, block_size) for length in lens)


@given(st.integers(1, 5000), st.integers(1, 64))
def test_a_best_hit_is_whole_blocks_and_leaves_a_token_to_compute(prompt, block_size):
    split = memory.best_prefix_hit(prompt, block_size)
    assert split.hit_tokens % block_size == 0
    assert split.hit_tokens + split.computed_tokens == prompt
    assert 1 <= split.computed_tokens <= block_size


@given(st.integers(1, 10_000), st.data())
def test_the_earlier_the_hole_the_more_is_stranded(chain, data):
    evicted = data.draw(st.integers(0, chain - 1))
    assert memory.stranded_blocks(chain, evicted) + evicted + 1 == chain


@given(st.floats(0.3, 0.99), st.floats(0, 0.01), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 16, 32, 64]))
def test_more_utilisation_never_means_fewer_blocks(share, more, tp, block_size):
    def blocks(utilization):
        weights = 2 * LLAMA_3_8B.parameters
        return memory.num_blocks(80 * GIB, utilization, weights, GIB, GIB, GIB, LLAMA_3_8B, block_size, tp)

    assert blocks(share) <= blocks(share + more)


@given(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]))
def test_the_block_size_changes_the_tokens_that_fit_by_less_than_a_block(block_size):
    def tokens(size):
        return size * memory.num_blocks(80 * GIB, 0.9, 2 * LLAMA_3_8B.parameters, GIB, 0, 0, LLAMA_3_8B, size)

    assert 0 <= tokens(1) - tokens(block_size) < block_size


@given(st.integers(2, 8), st.integers(1, 3000), st.data())
def test_beams_take_at_most_separate_caches_and_at_least_one_block_each_beyond_the_first(beams, tokens, data):
    blocks = memory.beam_blocks(beams, tokens, data.draw(st.integers(0, tokens)))
    one = memory.blocks_for(tokens, 16)
    assert one + beams - 1 <= blocks <= beams * one

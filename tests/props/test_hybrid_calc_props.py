"""The calculator and the allocator agree on hybrid KV, though neither knows the other."""

from dataclasses import replace

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from minivllm.calc.budget import Budget
from minivllm.calc.hw import H100
from minivllm.calc.memory import block_bytes, hybrid_kv, layers_per_block
from minivllm.calc.models import Shape
from minivllm.config import EngineConfig, ModelConfig
from minivllm.kv.hybrid import form_groups, make_manager, request_blocks
from minivllm.runner.kv_memory import plan_kv_memory
from tests.builders import make_request

windows = st.one_of(st.none(), st.integers(1, 40))
kinds = st.lists(windows, min_size=1, max_size=3)
patterns = kinds.flatmap(lambda some: st.lists(st.sampled_from(some), min_size=1, max_size=12)).map(tuple)
MAX_POSITION = 2000
block_sizes = st.sampled_from((1, 2, 3, 4, 16))
chunks_of_a_prompt = st.lists(st.integers(1, 50), min_size=1, max_size=8)


def shape_with(pattern) -> Shape:
    return Shape("any", len(pattern), 64, 4, 2, 8, 64, 100, MAX_POSITION, window_pattern=tuple(pattern))


def group_windows(shape: Shape) -> tuple[int | None, ...]:
    return tuple(group.window for group in form_groups(shape.windows))


@given(patterns)
def test_both_put_as_many_layers_into_a_block(pattern):
    assert layers_per_block(pattern) == max(len(group.layers) for group in form_groups(pattern))


@given(patterns, block_sizes, chunks_of_a_prompt)
def test_a_sequence_holds_what_the_calculator_says_after_every_step(pattern, size, chunks):
    shape = shape_with(pattern)
    config = EngineConfig(block_size=size, max_num_batched_tokens=max(chunks), enable_prefix_caching=False)
    kv = make_manager(config, 6000, group_windows(shape))
    request = make_request("r", sum(chunks))
    (sequence,) = request.sequences
    for chunk in chunks:
        assert kv.allocate(sequence, chunk) is not None
        sequence.num_computed += chunk
        said = hybrid_kv(shape, sequence.num_computed, size, in_flight=chunk)
        assert said.held == kv.num_held(request)[0] * block_bytes(shape, size)


@given(patterns, block_sizes, chunks_of_a_prompt)
def test_with_one_table_a_sequence_holds_every_token_in_every_layer(pattern, size, chunks):
    shape = shape_with(pattern)
    kv = make_manager(EngineConfig(block_size=size, enable_prefix_caching=False), 1000, (None,))
    request = make_request("r", sum(chunks))
    assert kv.allocate(request.sequences[0], sum(chunks)) is not None
    block = size * shape.kv_bytes_per_token()
    assert hybrid_kv(shape, sum(chunks), size).one_table == kv.num_held(request)[0] * block


@given(patterns, block_sizes, st.integers(1, 3000), st.integers(1, 600))
def test_both_reserve_the_same_for_a_request(pattern, size, length, in_flight):
    shape = shape_with(pattern)
    config = EngineConfig(block_size=size, max_num_batched_tokens=in_flight)
    reserved = request_blocks(length, group_windows(shape), config) * block_bytes(shape, size)
    assert hybrid_kv(shape, length, size, in_flight).reserved == reserved


@given(patterns, block_sizes, st.integers(1, 3000), st.integers(1, 600))
def test_what_is_held_is_within_what_is_reserved(pattern, size, length, in_flight):
    said = hybrid_kv(shape_with(pattern), length, size, min(in_flight, length))
    assert said.held <= said.reserved


@given(patterns, block_sizes, st.integers(1, 3000))
def test_the_saving_is_at_most_the_share_of_layers_with_a_window(pattern, size, length):
    sliding = sum(window is not None for window in pattern) / len(pattern)
    assert hybrid_kv(shape_with(pattern), length, size).saving <= sliding


@given(st.lists(st.booleans(), max_size=6), st.integers(1, 40), block_sizes, st.integers(1, 200), st.integers(1, 400))
def test_a_plan_and_an_engine_count_the_same_blocks_and_fit_the_same_lengths(sliding, window, size, step, kv_kib):
    shape = shape_with([None, *(window if slides else None for slides in sliding)])
    gpu = replace(H100, usable_bytes=2 * shape.parameters + 1024 * kv_kib)
    budget = Budget(shape, gpu, "auto", 1, 1, size, 16, 16, 0, 0, 0, max_num_batched_tokens=step)
    assume(budget.fits)
    config = EngineConfig(kv_cache_memory=budget.kv_budget, block_size=size, max_num_batched_tokens=step)
    engine = plan_kv_memory(config, config_of(shape), torch.bfloat16)
    assert (budget.num_blocks, budget.block_bytes) == (engine.num_blocks, engine.block_bytes)
    assert budget.length == engine.max_model_len
    assert budget.needed_bytes == engine.blocks_per_request * engine.block_bytes
    assert budget.concurrency == engine.max_concurrency


def config_of(shape: Shape) -> ModelConfig:
    """The same model for the engine."""
    layer_kinds = tuple("full" if window is None else "sliding" for window in shape.windows)
    return ModelConfig(
        "llama", 100, 64, 64, shape.num_layers, 4, 2, 8,
        max_position=MAX_POSITION, sliding_window=max((w for w in shape.windows if w), default=None), layer_kinds=layer_kinds,
    )  # fmt: skip

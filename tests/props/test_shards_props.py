"""Shards of a model, run together, are the model: whatever its heads, and however unevenly they are dealt."""

from collections import Counter
from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.config import ModelConfig
from minivllm.models.decoder import Decoder
from minivllm.models.shards import can_split, make_shard, split_heads, spread
from minivllm.runner.attention import attend_one
from minivllm.runner.parallel import RowParallelLinear
from tests.random_weights import random_weights
from tests.thread_group import ThreadGroup

TOKENS = torch.tensor([3, 1, 4, 1, 5])
MAX_SIZE = 4


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    num_kv_heads = draw(st.integers(1, 4))
    return ModelConfig(
        draw(st.sampled_from(["llama", "qwen2", "qwen3"])),  # plain; with biases; with norms of query and key heads
        vocab_size=11,
        hidden_size=8,
        intermediate_size=draw(st.integers(4, 9) | st.sampled_from([48, 64])),
        num_layers=draw(st.integers(1, 2)),
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=4,
    )


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    model = draw(models())
    return model, draw(st.sampled_from([size for size in range(1, MAX_SIZE + 1) if can_split(model, size)]))


def attend(layer, q, k, v):
    """Causal attention with no cache."""
    return torch.stack([attend_one(query, k[: i + 1], v[: i + 1]) for i, query in enumerate(q)])


def forward(decoder):
    with torch.inference_mode():
        return decoder.logits(decoder.forward(TOKENS, torch.arange(len(TOKENS)), attend))


def sharded_forward(model, weights, group):
    def work(rank, all_reduce):
        shard = make_shard(model, rank, group.size)
        part = {name: shard.cut(name, weight) for name, weight in weights.items()}
        row_linear = partial(RowParallelLinear, all_reduce=all_reduce)
        return forward(Decoder(shard.config, part, dtype=torch.float64, row_linear=row_linear))

    return group.run(work)


@given(splits())
def test_shards_together_compute_what_the_whole_model_computes(split):
    model, size = split
    weights = random_weights(model, dtype=torch.float64)
    whole = forward(Decoder(model, weights, dtype=torch.float64))
    for logits in sharded_forward(model, weights, ThreadGroup(size)):
        torch.testing.assert_close(logits, whole, rtol=1e-9, atol=1e-9)


@given(splits())
def test_a_step_takes_two_sums_a_layer(split):
    model, size = split
    group = ThreadGroup(size)
    sharded_forward(model, random_weights(model, dtype=torch.float64), group)
    assert group.num_sums == [2 * model.num_layers] * size


@given(splits())
def test_every_query_head_is_at_one_rank_beside_the_kv_head_it_reads(split):
    model, size = split
    parts = [split_heads(model.num_heads, model.num_kv_heads, rank, size) for rank in range(size)]
    assert Counter(head for heads, _ in parts for head in heads) == dict.fromkeys(range(model.num_heads), 1)
    for heads, kv_heads in parts:
        assert {head // (model.num_heads // model.num_kv_heads) for head in heads} == set(kv_heads)


@given(splits())
def test_every_rank_finds_the_kv_head_that_its_shard_s_own_arithmetic_gives(split):
    """Within a shard, query head h reads KV head h // (H / Hkv), as in any model."""
    model, size = split
    for rank in range(size):
        shard = make_shard(model, rank, size)
        local_group = shard.config.num_heads // shard.config.num_kv_heads
        for local, head in enumerate(shard.heads):
            assert shard.kv_heads[local // local_group] == head // (model.num_heads // model.num_kv_heads)


@given(splits())
def test_no_rank_has_more_kv_heads_than_rank_0_which_sizes_the_cache(split):
    model, size = split
    counts = [make_shard(model, rank, size).config.num_kv_heads for rank in range(size)]
    assert counts[0] == max(counts) == max(1, -(-model.num_kv_heads // size))


@given(st.integers(0, 100), st.integers(1, 10))
def test_spread_deals_everything_once_in_order_and_evenly(total, parts):
    ranges = [spread(total, index, parts) for index in range(parts)]
    assert [thing for part in ranges for thing in part] == list(range(total))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1

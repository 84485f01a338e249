"""Shards and the layers that join them, example by example; and which sizes a model refuses."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.models.layers import PackedLinear
from minivllm.models.loader import load_model
from minivllm.models.shards import can_split, make_shard, spread
from minivllm.runner.kv_memory import plan_kv_memory
from minivllm.runner.parallel import RowParallelLinear
from tests.cli_support import write_tiny_model
from tests.thread_group import ThreadGroup

SMOLLM2 = ModelConfig(
    "llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
    head_dim=64,
)  # fmt: skip


def test_nine_heads_on_two_ranks_are_two_whole_kv_groups_and_one():
    parts = [make_shard(SMOLLM2, rank, 2) for rank in range(2)]
    assert [(part.heads, part.kv_heads) for part in parts] == [(range(6), range(2)), (range(6, 9), range(2, 3))]


def test_beyond_the_kv_heads_each_is_at_as_many_ranks_and_its_readers_are_dealt_among_them():
    parts = [make_shard(SMOLLM2, rank, 6) for rank in range(6)]
    assert [list(part.kv_heads) for part in parts] == [[0], [0], [1], [1], [2], [2]]
    assert [list(part.heads) for part in parts[:2]] == [[0, 1], [2]]


@pytest.mark.parametrize("size", [4, 5, 7, 8, 10, 12])
def test_a_size_that_would_leave_kv_heads_with_unlike_numbers_of_ranks_is_refused(size):
    with pytest.raises(
        ConfigError, match=rf"tensor_parallel_size={size}: .*9 heads with 3 KV heads.*use 1, 2, 3, 6, 9$"
    ):
        make_shard(SMOLLM2, 0, size)


def test_a_feed_forward_network_of_fewer_elements_than_ranks_is_refused():
    model = ModelConfig("llama", 8, 8, intermediate_size=2, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=2)
    assert [size for size in range(1, 5) if can_split(model, size)] == [1, 2]


def test_the_feed_forward_network_is_cut_at_whole_vectors_where_it_has_them():
    assert [len(make_shard(SMOLLM2, rank, 9).inner) for rank in range(9)] == [11 * 16] * 6 + [10 * 16] * 3


def test_kv_memory_of_a_rank_counts_the_kv_heads_it_has():
    config = EngineConfig(kv_cache_memory=2**25, tensor_parallel_size=2)
    per_token = [
        plan_kv_memory(config, make_shard(SMOLLM2, 0, n).config, torch.float32).bytes_per_token for n in (1, 3, 9)
    ]
    assert per_token == [2 * 30 * heads * 64 * 4 for heads in (3, 1, 1)]


def test_a_shard_is_read_as_parts_of_the_weights_and_a_smaller_configuration(tmp_path):
    path = write_tiny_model(tmp_path / "model", num_key_value_heads=2)
    whole, part = load_model(path, torch.float64), load_model(path, torch.float64, rank=1, size=2)
    name = "model.layers.1.self_attn."
    torch.testing.assert_close(part.weights[name + "k_proj.weight"], whole.weights[name + "k_proj.weight"][8:])
    torch.testing.assert_close(part.weights[name + "o_proj.weight"], whole.weights[name + "o_proj.weight"][:, 8:])
    assert (part.config.num_heads, part.config.num_kv_heads, part.config.intermediate_size) == (1, 1, 16)


@pytest.mark.parametrize("size", range(1, 5))
def test_a_column_and_a_row_parallel_layer_are_one_sum_apart_from_two_whole_ones(size):
    """No rank needs another's part in between; and the bias of the first layer is added once."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    x, up, bias, down = draw(3, 6), draw(10, 6), draw(10), draw(6, 10)
    group = ThreadGroup(size)

    def work(rank, all_reduce):
        part = slice(spread(10, rank, size).start, spread(10, rank, size).stop)
        column = PackedLinear(up[part], bias[part])
        return RowParallelLinear(down[:, part], all_reduce)(F.silu(column(x)))

    for output in group.run(work):
        torch.testing.assert_close(output, F.linear(F.silu(F.linear(x, up, bias)), down), rtol=1e-9, atol=1e-9)
    assert group.num_sums == [1] * size

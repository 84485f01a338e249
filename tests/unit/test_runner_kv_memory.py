"""The arithmetic of the KV cache's size, and when it's refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.calc.hw import GIB
from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.runner.device_memory import DeviceMemory
from minivllm.runner.kv_cache import KVCache
from minivllm.runner.kv_memory import plan_kv_memory

SMOLLM2 = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, max_position=8192)
TOKEN_BYTES = 23_040  # 2 * 30 layers * 3 heads * 64 * 2 bytes


def plan(memory: DeviceMemory | None = None, **config: object):
    return plan_kv_memory(EngineConfig(**config), SMOLLM2, torch.bfloat16, memory)


def test_a_tenth_of_free_memory_by_default():
    memory = plan(DeviceMemory(24 * GIB, used_bytes=12 * GIB, loaded_bytes=2 * GIB))
    assert (memory.source, memory.bytes_per_token, memory.num_blocks) == ("kv_memory_fraction", TOKEN_BYTES, 2912)
    assert memory.tokens == 2911 * 16


def test_bytes_win_over_the_fraction_and_a_count_over_both():
    assert plan(kv_cache_memory=600 * 16 * TOKEN_BYTES + 1).num_blocks == 600
    assert plan(kv_cache_memory=1, num_kv_blocks=700).num_blocks == 700


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"num_kv_blocks": 10**5}, r"num_kv_blocks=100000: 100,000 blocks take 34\.33 GiB, but 12\.00 GiB are free"),
        ({"kv_cache_memory": 20 * GIB}, r"kv_cache_memory=21474836480: 58,254 blocks take 20\.00 GiB, but 12\.00 GiB"),
        (
            {"num_kv_blocks": 100, "host_kv_blocks": 10**5},
            r"num_kv_blocks=100: 100 blocks and 100,000 of host_kv_blocks take 34\.37 GiB, but 12\.00 GiB are free",
        ),
        ({"memory_utilization": 0.5, "host_kv_blocks": 40_000}, r"and 40,000 of host_kv_blocks take .* are free; ask for less"),
    ],
)  # fmt: skip
def test_blocks_that_find_no_room_are_refused(asked: dict[str, object], told: str):
    with pytest.raises(ConfigError, match=told):
        plan(DeviceMemory(16 * GIB, loaded_bytes=4 * GIB), device="cpu", **asked)


def test_one_request_of_full_length_must_fit_beside_the_null_block():
    assert plan(num_kv_blocks=65, max_model_len=1024).max_concurrency == 1
    with pytest.raises(ConfigError, match=r"needs 64 blocks.* at most 1,008, num_kv_blocks to at least 65") as error:
        plan(num_kv_blocks=64, max_model_len=1024)
    assert error.value.field == "max_model_len"


def test_without_a_length_it_is_what_fits_up_to_the_models_own():
    assert plan(num_kv_blocks=64).max_model_len == 1008
    assert plan(num_kv_blocks=9999).max_model_len == 8192


def test_a_length_beyond_the_models_positions_is_refused():
    with pytest.raises(ConfigError, match="max_model_len=8193: the model was made for at most 8,192 positions"):
        plan(num_kv_blocks=9999, max_model_len=8193)


def test_a_cache_of_the_null_block_alone_is_refused():
    with pytest.raises(ConfigError, match="num_kv_blocks=1: gives no usable block"):
        plan(num_kv_blocks=1)


@given(st.integers(2, 4000), st.integers(1, 64))
def test_the_length_that_fits_passes_and_one_more_fails(num_blocks, block_size):
    fits = min((num_blocks - 1) * block_size, SMOLLM2.max_position)
    plan(num_kv_blocks=num_blocks, block_size=block_size, max_model_len=fits)
    with pytest.raises(ConfigError):
        plan(num_kv_blocks=num_blocks, block_size=block_size, max_model_len=fits + 1)


def test_the_summary_holds_the_arithmetic():
    text = str(plan(num_kv_blocks=65, max_model_len=512))
    assert "65 blocks of 16 tokens (from num_kv_blocks)" in text
    assert "23,040 bytes" in text
    assert "1,024 tokens fit: 2.0 requests of 512 tokens" in text


def test_the_cache_takes_the_bytes_that_were_planned():
    cache = KVCache(SMOLLM2, 4, 16, torch.bfloat16)
    assert sum(layer.nbytes for layer in cache.layers) == 4 * 16 * TOKEN_BYTES

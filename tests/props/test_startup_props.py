"""The memory budget, for drawn devices, models and windows."""

from dataclasses import replace

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from minivllm.calc.budget import Budget
from minivllm.calc.hw import H100
from minivllm.calc.models import SHAPES
from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.runner.device_memory import DeviceMemory, kv_budget
from minivllm.runner.kv_memory import plan_kv_memory

SIZES = st.integers(0, 2**22)
DEVICES = st.builds(DeviceMemory, st.integers(2**22, 2**26), st.just(0), SIZES, SIZES)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """A small model, maybe with windows in some layers."""
    num_layers = draw(st.integers(1, 6))
    kinds = tuple(draw(st.lists(st.sampled_from(("full", "sliding")), min_size=num_layers, max_size=num_layers)))
    window, heads = draw(st.integers(1, 100)), draw(st.integers(1, 4))
    return ModelConfig(
        "llama", 64, 32, 64, num_layers, heads, heads, 8, max_position=4096, sliding_window=window, layer_kinds=kinds
    )


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    return EngineConfig(
        memory_utilization=draw(st.floats(0.05, 1)),
        block_size=draw(st.sampled_from((1, 4, 16))),
        max_num_batched_tokens=draw(st.integers(1, 512)),
        hybrid=draw(st.sampled_from(("on", "off"))),
    )


def refusal(device: DeviceMemory, config: EngineConfig, model: ModelConfig) -> ConfigError | None:
    try:
        plan_kv_memory(config, model, torch.float32, device)
    except ConfigError as error:
        return error
    return None


def starts(device: DeviceMemory, config: EngineConfig, model: ModelConfig) -> bool:
    return refusal(device, config, model) is None


@given(DEVICES, configs(), models())
def test_the_blocks_are_within_the_budget_and_one_more_would_not_be(device, config, model):
    assume(starts(device, config, model))
    memory = plan_kv_memory(config, model, torch.float32, device)
    budget = kv_budget(device, config, config.memory_utilization)
    assert memory.num_blocks * memory.block_bytes <= budget < (memory.num_blocks + 1) * memory.block_bytes
    assert budget + device.taken_bytes <= device.total_bytes


@given(DEVICES, configs(), models())
def test_auto_is_the_largest_length_that_passes(device, config, model):
    assume(starts(device, config, model))
    longest = plan_kv_memory(config, model, torch.float32, device).max_model_len
    assert starts(device, replace(config, max_model_len=longest), model)
    assert not starts(device, replace(config, max_model_len=longest + 1), model)


@given(DEVICES, configs(), models(), st.integers(1, 4096), st.integers(0, 2**20))
def test_what_starts_also_starts_shorter_with_a_larger_share_and_with_smaller_weights(device, config, model, n, less):
    config = replace(config, max_model_len=n)
    assume(starts(device, config, model))
    assert starts(device, replace(config, max_model_len=max(n // 2, 1)), model)
    assert starts(device, replace(config, memory_utilization=1.0), model)
    assert starts(replace(device, loaded_bytes=max(device.loaded_bytes - less, 0)), config, model)


@given(DEVICES, configs(), models())
def test_every_refusal_names_a_setting(device, config, model):
    error = refusal(device, config, model)
    assert error is None or error.field in ("memory_utilization", "max_model_len")


@given(st.sampled_from(SHAPES), st.sampled_from((1, 2, 4)), st.floats(0.1, 1), st.sampled_from((8, 16)))
def test_a_planned_budget_is_within_the_gpu_and_auto_the_largest_that_fits(shape, tp, share, kv_bits):
    assume(shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0)
    budget = Budget(shape, H100, "auto", tp, share, kv_bits=kv_bits)
    assert budget.num_blocks == 0 or budget.num_blocks * budget.block_bytes <= budget.kv_budget
    assert (budget.num_blocks + 1) * budget.block_bytes > budget.kv_budget
    assert budget.fits == (budget.longest > 0)
    assert budget.length <= min(budget.longest, shape.max_position)
    assert replace(budget, max_model_len=max(budget.length, 1)).fits == budget.fits
    assert not replace(budget, max_model_len=budget.length + 1).fits

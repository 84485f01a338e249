"""gpt-oss at 131,072 tokens: what the allocator gives it, hybrid on and off. No weights: its shape is enough."""

import pytest
import torch

from minivllm.calc.memory import hybrid_kv
from minivllm.calc.models import GPT_OSS_20B, GPT_OSS_120B
from minivllm.config import EngineConfig, ModelConfig
from minivllm.kv.hybrid import form_groups, request_blocks, window_cap
from minivllm.runner.kv_memory import plan_kv_memory
from minivllm.sched.scheduler import Scheduler
from tests.builders import draw, make_request

LENGTH, BUDGET, WINDOW, GIB = 131_072, 8192, 128, 2**30


def shape(num_layers: int, window: int = WINDOW) -> ModelConfig:
    kinds = ("sliding", "full") * (num_layers // 2)
    return ModelConfig(
        "llama",
        201_088,
        2880,
        2880,
        num_layers,
        64,
        8,
        64,
        max_position=LENGTH,
        sliding_window=window,
        layer_kinds=kinds,
    )


def plan(num_layers: int = 36, hybrid: str = "on"):
    config = EngineConfig(num_kv_blocks=16_385, max_num_batched_tokens=BUDGET, hybrid=hybrid)
    return plan_kv_memory(config, shape(num_layers), torch.bfloat16)


def held_bytes(memory, num_blocks: int) -> float:
    return num_blocks * memory.block_bytes / GIB


def test_two_groups_of_18_layers_share_blocks_of_576_kib():
    assert [len(group.layers) for group in form_groups(shape(36).windows)] == [18, 18]
    assert plan().block_bytes == 576 * 1024


@pytest.mark.parametrize(("num_layers", "gib"), [(36, 9.0), (24, 6.0)])
def test_off_every_layer_keeps_every_token(num_layers, gib):
    memory = plan(num_layers, "off")
    assert held_bytes(memory, memory.blocks_per_request) == gib


def test_a_long_request_is_budgeted_its_window_and_a_step():
    memory = plan()
    assert memory.blocks_per_request == 8192 + 521
    assert 1 - held_bytes(memory, memory.blocks_per_request) / 9 == pytest.approx(0.4682, abs=5e-5)


def test_with_two_steps_in_flight_the_window_is_budgeted_1033_blocks():
    cap = window_cap(WINDOW, 2 * BUDGET, 16)
    assert cap == 1033
    assert held_bytes(plan(), 8192 + cap) == pytest.approx(5.07, abs=5e-3)
    assert 1 - held_bytes(plan(), 8192 + cap) / 9 == pytest.approx(0.4370, abs=5e-5)


@pytest.mark.parametrize(("num_layers", "full", "hybrid"), [(36, 9.0, 4.5044), (24, 6.0, 3.0029)])
def test_in_the_end_a_request_holds_half_of_everything_and_a_window(num_layers, full, hybrid):
    """Run the scheduler over the whole context; the saving is the share of sliding layers, whatever their window."""
    held = peak_and_last(num_layers)
    memory = plan(num_layers)
    assert held[1] == 8192 + 9  # the window's 128 tokens lie in 9 blocks, or in 8 when it begins with one
    assert held_bytes(memory, held[1] - 1) == pytest.approx(hybrid, abs=5e-5)
    assert 1 - held_bytes(memory, held[1] - 1) / full == pytest.approx(0.4995, abs=5e-5)
    assert max(held) <= memory.blocks_per_request


@pytest.mark.parametrize("gpt_oss", [GPT_OSS_20B, GPT_OSS_120B])
def test_the_calculator_says_what_the_scheduler_is_seen_to_hold_and_to_reserve(gpt_oss):
    memory, said = plan(gpt_oss.num_layers), hybrid_kv(gpt_oss, LENGTH - 1)  # the last token drawn is never computed
    assert said.held == peak_and_last(gpt_oss.num_layers)[1] * memory.block_bytes
    assert hybrid_kv(gpt_oss, LENGTH, in_flight=BUDGET).reserved == memory.blocks_per_request * memory.block_bytes


def peak_and_last(num_layers: int) -> tuple[int, int]:
    """Blocks held at most, and after the last token of the context."""
    windows = tuple(group.window for group in form_groups(shape(num_layers).windows))
    config = EngineConfig(max_num_batched_tokens=BUDGET, enable_prefix_caching=False)
    scheduler = Scheduler(config, 1 + request_blocks(LENGTH, windows, config), LENGTH, (), None, windows)
    request = make_request("long", list(range(LENGTH - 20)), max_tokens=20)
    scheduler.add(request)
    held = []
    while scheduler.has_requests:
        step = scheduler.schedule()
        held.append(scheduler.kv.num_held(request)[0])
        scheduler.update(step, draw(step))
    assert scheduler.num_preemptions == 0
    return max(held), held[-1]


def test_the_saving_is_the_layer_ratio_for_longer_windows_too():
    """What remains of the half that slides is one window of it."""
    for window, saving in [(1024, 0.496), (4096, 0.484)]:
        blocks = LENGTH // 16 + window // 16
        assert 1 - blocks / (2 * LENGTH // 16) == pytest.approx(saving, abs=5e-4)


def test_gemmas_ratio_of_five_to_one_forms_six_groups():
    windows = (1024,) * 5 + (None,)
    groups = form_groups(windows * 4)
    assert [group.window for group in groups] == [None, *[1024] * 5]
    config = EngineConfig(max_num_batched_tokens=1)
    saving = 1 - (LENGTH // 16 + 5 * 1024 // 16) / (6 * LENGTH // 16)
    assert saving == pytest.approx(0.827, abs=5e-4)
    capped = 1 - request_blocks(LENGTH, tuple(g.window for g in groups), config) / (6 * LENGTH // 16)
    assert saving - 0.001 < capped <= saving

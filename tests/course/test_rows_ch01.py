"""Chapter 1, row A22: what generating costs, on the real model and by calculator."""

import pytest
import torch

from lessons.naive import naive_cached_generate, naive_generate
from minivllm.calc.hw import DESKTOP_DDR5, GB, H100, M4_MAX, RTX_4090
from minivllm.calc.models import LLAMA_3_8B, Q4_K_M_BYTES, SMOLLM2_135M
from minivllm.calc.roofline import decode_step, decode_tps, linear_flops, ridge_flops_per_byte, spill_tps
from minivllm.config import EngineConfig
from minivllm.llm import LLM
from minivllm.models.fetch import resolve_model
from minivllm.models.loader import load_model
from minivllm.request import SamplingParams

Q4_8B, Q4_70B = Q4_K_M_BYTES["Llama-3-8B"], Q4_K_M_BYTES["Llama-3-70B"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    ("device", "bytes_per_token", "tps"),
    [
        (M4_MAX, Q4_8B, 111.0),
        (RTX_4090, Q4_8B, 204.9),
        (H100, 2 * LLAMA_3_8B.parameters, 208.6),
        (H100, LLAMA_3_8B.parameters, 417.2),
        (M4_MAX, Q4_70B, 12.8),
    ],
)
def test_row_A22_bounds_for_one_user(device, bytes_per_token, tps):
    assert decode_tps(device.bandwidth_bytes_per_s, bytes_per_token) == pytest.approx(tps, rel=0.01)


def test_row_A22_a_spilled_70b_runs_at_3_59():
    machines = (RTX_4090.bandwidth_bytes_per_s, DESKTOP_DDR5.bandwidth_bytes_per_s)
    assert spill_tps(Q4_70B, 22 * GB, *machines) == pytest.approx(3.59, rel=0.01)


def test_row_A22_one_spilled_layer_in_ten_halves_the_speed():
    machines = (RTX_4090.bandwidth_bytes_per_s, DESKTOP_DDR5.bandwidth_bytes_per_s)
    assert spill_tps(Q4_70B, 0.9 * Q4_70B, *machines) < 0.5 * spill_tps(Q4_70B, Q4_70B, *machines)


def test_row_A22_at_1024_tokens_of_context_kv_bounds_the_h100_and_arithmetic_the_laptop():
    h100 = [
        decode_step(LLAMA_3_8B, H100, b, 1024, weight_bytes=LLAMA_3_8B.parameters, kv_element_bytes=1, precision="fp8")
        for b in (1, 256, 1024)
    ]
    assert [step.limited_by for step in h100] == ["memory"] * 3
    assert h100[1].tokens_per_s == pytest.approx(34_018, rel=0.01)
    laptop = [decode_step(LLAMA_3_8B, M4_MAX, b, 1024, weight_bytes=Q4_8B).limited_by for b in (16, 64)]
    assert laptop == ["memory", "compute"]


def test_row_A22_the_ridge_of_an_h100_and_the_laptops_share_of_its_arithmetic():
    assert ridge_flops_per_byte(H100) == pytest.approx(295.3, rel=0.001)
    assert linear_flops(LLAMA_3_8B, 2000) / (0.5 * M4_MAX.bf16) == pytest.approx(1.9, rel=0.01)
    assert linear_flops(LLAMA_3_8B, 2000) / (0.5 * H100.bf16) == pytest.approx(0.065, rel=0.01)


# on the model


@pytest.fixture(scope="module")
def llm():
    return LLM(config=EngineConfig(dtype="float32", num_kv_blocks=128))


@pytest.mark.model
def test_row_A22_a_token_reads_what_the_shape_says():
    weights = load_model(resolve_model(None), torch.float32).weights
    assert sum(w.numel() * w.element_size() for w in weights.values()) == 4 * SMOLLM2_135M.parameters == 538_060_032


@pytest.mark.model
def test_row_A22_the_loop_without_a_cache_with_one_and_the_engine_say_the_same(llm):
    prompt = llm.tokenizer.encode("The capital of France is")
    engine = list(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids)
    decoder = llm.engine.core.runner.model
    assert naive_generate(decoder, prompt, 12)[0] == naive_cached_generate(decoder, prompt, 12)[0] == engine


@pytest.mark.model
@pytest.mark.parametrize("count", [1, 8])
def test_row_A22_a_batch_takes_as_many_steps_as_one_request(llm, count):
    steps = []
    prompts = [llm.tokenizer.encode(f"Reader {i} asks") for i in range(count)]
    llm.generate(prompts, GREEDY, on_step=lambda done, total: steps.append(done))
    assert len(steps) == 12

"""The decoder against an independent one, for each family."""

import pytest
import torch

from minivllm.config import EngineConfig, ModelConfig, ModelError, RopeScaling
from minivllm.models.decoder import Decoder
from minivllm.models.layers import PackedLinear, rotary_frequencies
from minivllm.plan import Row, StepPlan
from minivllm.request import Request, SamplingParams
from minivllm.runner.model_runner import ModelRunner
from tests.random_weights import random_weights
from tests.reference_decoder import reference_logits

LLAMA3 = RopeScaling(8.0, 1.0, 4.0, 32)


def tiny(architecture: str, *, tied: bool = False, scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig(architecture, 61, 24, 40, 2, 6, 2, 8, rope_scaling=scaling, tie_word_embeddings=tied)


def all_logits(model: Decoder, token_ids: list[int], backend: str = "torch") -> torch.Tensor:
    """Logits of each position, through the runner."""
    runner = ModelRunner(model, EngineConfig(block_size=4, attention_backend=backend), 16)
    request = Request("r", token_ids, SamplingParams(prompt_logprobs=0), max_tokens=1)
    row = Row(request.sequences[0], 0, len(token_ids), list(range(1, -(-len(token_ids) // 4) + 1)))
    return runner.execute(StepPlan(0, [row])).prompt_logits[0]


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_agree_with_an_independent_decoder(architecture, tied, scaling):
    config = tiny(architecture, tied=tied, scaling=scaling)
    weights = random_weights(config)
    token_ids = list(range(3, 40, 2))
    got = all_logits(Decoder(config, weights, dtype=torch.float32), token_ids)
    torch.testing.assert_close(got, reference_logits(config, weights, token_ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_float64_agrees_to_float64(backend):
    config = tiny("qwen3")
    weights = random_weights(config, dtype=torch.float64)
    got = all_logits(Decoder(config, weights, dtype=torch.float64), [5, 7, 9, 11, 2], backend)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, reference_logits(config, weights, [5, 7, 9, 11, 2]), rtol=1e-12, atol=1e-12)


def test_bfloat16_logits_come_as_float32_and_close():
    config = tiny("llama")
    weights = random_weights(config)
    got = all_logits(Decoder(config, weights, dtype=torch.bfloat16), [5, 7, 9, 11, 2])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference_logits(config, weights, [5, 7, 9, 11, 2]), rtol=0.1, atol=0.15)


def test_a_missing_weight_is_named():
    config = tiny("llama")
    weights = random_weights(config)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        Decoder(config, weights, dtype=torch.float32)


def test_a_weight_of_another_shape_is_named():
    config = tiny("llama")
    weights = random_weights(config) | {"model.norm.weight": torch.ones(23)}
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(23,\)"):
        Decoder(config, weights, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_packed_linear_is_a_linear_layer(dtype, with_bias):
    generator = torch.Generator().manual_seed(1)
    x, w, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 24), (16, 24), (16,)))
    bias = b if with_bias else None
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(PackedLinear(w, bias)(x), torch.nn.functional.linear(x, w, bias), **tolerance)


def test_llama3_scaling_keeps_fast_and_slows_slow_frequencies():
    plain = rotary_frequencies(ModelConfig("llama", 8, 8, 8, 1, 1, 1, 64))
    scaled = rotary_frequencies(ModelConfig("llama", 8, 8, 8, 1, 1, 1, 64, rope_scaling=RopeScaling(8, 1, 4, 8192)))
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8

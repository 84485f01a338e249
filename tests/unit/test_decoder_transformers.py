"""The default model beside Hugging Face's implementation, where that is installed."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from minivllm.config import EngineConfig
from minivllm.models.decoder import Decoder
from minivllm.models.fetch import resolve_model
from minivllm.models.loader import LoadedModel, load_model
from minivllm.plan import Row, StepPlan
from minivllm.request import Request, SamplingParams
from minivllm.runner.model_runner import ModelRunner

TEXT = "The capital of France is Paris. Paging cuts the KV cache into blocks of equal size, so that"


def their_logits(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    shape = asdict(loaded.config)
    renamed = {
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "max_position_embeddings": shape["max_position"],
        "rope_parameters": {"rope_type": "default", "rope_theta": shape["rope_theta"]},
    }
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "tie_word_embeddings")
    config = transformers.LlamaConfig(**renamed, **{name: shape[name] for name in same})
    model = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(loaded.weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def our_logits(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    decoder = Decoder(loaded.config, loaded.weights, dtype=torch.float32)
    runner = ModelRunner(decoder, EngineConfig(), num_blocks=8)
    request = Request("r", token_ids, SamplingParams(prompt_logprobs=0), max_tokens=1)
    row = Row(request.sequences[0], 0, len(token_ids), [3, 1, 4, 2])
    return runner.execute(StepPlan(0, [row])).prompt_logits[0]


@pytest.mark.model
def test_logits_agree_with_transformers_on_the_default_model():
    pytest.importorskip("transformers")
    loaded = load_model(resolve_model(None), torch.float32)
    token_ids = loaded.tokenizer.encode(TEXT)
    torch.testing.assert_close(our_logits(loaded, token_ids), their_logits(loaded, token_ids), rtol=1e-4, atol=1e-3)

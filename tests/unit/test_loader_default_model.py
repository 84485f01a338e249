"""The default model, as it is fetched."""

import pytest
import torch

from minivllm.config import ModelConfig
from minivllm.models.fetch import resolve_model
from minivllm.models.loader import LoadedModel, load_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def default_model() -> LoadedModel:
    return load_model(resolve_model(None), torch.bfloat16)


def test_its_shape_is_that_of_smollm2_135m(default_model):
    assert default_model.config == ModelConfig(
        "llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, rms_norm_eps=default_model.config.rms_norm_eps, rope_theta=100_000.0, max_position=8192,
        tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,), name="Smollm2 135M 8k Lc100K Mix1 Ep2",
    )  # fmt: skip


def test_it_has_as_many_weights_as_published(default_model):
    assert sum(w.numel() for w in default_model.weights.values()) == 134_515_008


def test_its_weights_are_bfloat16_and_finite(default_model):
    assert {w.dtype for w in default_model.weights.values()} == {torch.bfloat16}
    assert all(w.isfinite().all() for w in default_model.weights.values())

"""What start-up refuses: each refusal names the setting, its value and what to do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.engine import startup
from minivllm.engine.startup import build_engine, start_engine
from minivllm.models.decoder import Decoder
from tests.byte_tokenizer import ByteTokenizer
from tests.cli_support import write_tiny_model
from tests.random_weights import random_weights

TINY = ModelConfig("llama", 258, 16, 32, 1, 2, 1, 8, max_position=128)
DRAFTING = EngineConfig(num_kv_blocks=9, spec_method="draft", draft_model="the/draft", device="cpu")


def decoder(**changes: object) -> Decoder:
    model = replace(TINY, **changes)
    return Decoder(model, random_weights(model, dtype=torch.float32), dtype=torch.float32, device="cpu")


def refusal(model: Path | str = "no/such-model", **settings: object) -> str:
    """What `start_engine` says to a configuration. A model that doesn't exist: it is refused before one is looked for."""
    with pytest.raises(ConfigError) as error:
        start_engine(model, EngineConfig(**{"device": "cpu", **settings}))
    return str(error.value)


def draft_refusal(config: EngineConfig, target: Decoder, draft: Decoder | None) -> str:
    """What `build_engine` says to a draft model."""
    with pytest.raises(ConfigError) as error:
        build_engine(target, ByteTokenizer(), config, draft=draft)
    return str(error.value)


# tensor parallelism


def test_a_share_of_the_device_is_not_for_ranks():
    assert refusal(tensor_parallel_size=2, memory_utilization=0.5) == (
        "memory_utilization=0.5: is measured for one process only; give kv_cache_memory instead"
    )


def test_a_share_that_a_given_size_overrules_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch):
    def found(model: str) -> Path:
        raise LookupError("got as far as the model")

    monkeypatch.setattr(startup, "resolve_model", found)
    config = EngineConfig(tensor_parallel_size=2, memory_utilization=0.5, kv_cache_memory=2**20, device="cpu")
    with pytest.raises(LookupError):
        start_engine("no/such-model", config)


def test_a_draft_model_is_not_for_ranks():
    assert refusal(tensor_parallel_size=2, spec_method="draft", draft_model="the/draft") == (
        "spec_method='draft': its model runs in one process only; use ngram"
    )


# devices


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize("size", [1, 2])
def test_a_gpu_where_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, size: int):
    pretend_gpus(monkeypatch, 0)
    assert refusal(device="cuda", tensor_parallel_size=size) == (
        "device='cuda': torch finds no GPU: set it to cpu, or auto"
    )


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_more_ranks_than_gpus_are_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch, device: str):
    pretend_gpus(monkeypatch, 2)
    assert refusal(device=device, tensor_parallel_size=3) == (
        "tensor_parallel_size=3: needs a GPU each: set it to at most 2, or device to cpu"
    )


# draft models


def test_a_draft_model_of_another_tokenizer_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two of its tokens are others."""
    model, draft = write_tiny_model(tmp_path / "model"), write_tiny_model(tmp_path / "draft")
    text = (draft / "tokenizer.json").read_text()
    (draft / "tokenizer.json").write_text(text.replace('"a": ', '"swapped": ').replace('"b": ', '"a": '))
    assert refusal(model, spec_method="draft", draft_model=str(draft), num_kv_blocks=20) == (
        f"draft_model={str(draft)!r}: has other tokens than the model: they must share a tokenizer"
    )


def test_a_draft_model_of_the_same_tokenizer_starts(tmp_path: Path):
    model, draft = write_tiny_model(tmp_path / "model"), write_tiny_model(tmp_path / "draft")
    config = EngineConfig(spec_method="draft", draft_model=str(draft), num_kv_blocks=20, device="cpu")
    assert start_engine(model, config).core.speculation is not None


def test_a_draft_model_with_more_logits_than_the_model_is_refused():
    assert draft_refusal(DRAFTING, decoder(), decoder(vocab_size=300)) == (
        "draft_model='the/draft': must have 258 tokens, as the model has"
    )


def test_a_draft_model_that_ends_before_the_longest_request_is_refused():
    config = replace(DRAFTING, max_model_len=100)
    assert draft_refusal(config, decoder(), decoder(max_position=64)) == (
        "max_model_len=100: set it to at most 64, where the draft ends"
    )


def test_a_draft_model_that_ends_with_the_longest_request_starts():
    config = replace(DRAFTING, max_model_len=64)
    engine = build_engine(decoder(), ByteTokenizer(), config, draft=decoder(max_position=64))
    assert engine.kv_memory.max_model_len == 64


def test_a_draft_model_with_layers_of_two_kinds_is_refused():
    windowed = decoder(sliding_window=8)
    assert draft_refusal(DRAFTING, decoder(), windowed) == (
        "spec_method='draft': needs one block table for all layers: set hybrid=\"off\", or use ngram"
    )

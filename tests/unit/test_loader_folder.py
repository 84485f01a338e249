"""Reading a folder as Hugging Face publishes models."""

import dataclasses
import json

import pytest
import torch

from minivllm.config import ModelError, RopeScaling
from minivllm.models.loader import load_config, load_model, open_checkpoint
from minivllm.models.safetensors_model import eos_ids
from tests.model_files import tiny_config, write_folder
from tests.random_weights import random_weights


def folder(tmp_path, architecture="llama", **changes):
    config = tiny_config(architecture)
    return write_folder(tmp_path / "tiny", config, random_weights(config), **changes)


def config_of(path):
    return load_config(open_checkpoint(path))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_written_model_comes_back_whole(tmp_path, architecture, shards):
    config = tiny_config(architecture, tie_word_embeddings=architecture == "llama")
    tensors = random_weights(config)
    loaded = load_model(write_folder(tmp_path / "tiny", config, tensors, shards=shards), torch.float32)
    assert loaded.config == config
    assert loaded.weights.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded.weights[name], tensor), name


def test_weights_come_in_the_dtype_asked_for(tmp_path):
    loaded = load_model(folder(tmp_path), torch.float64)
    assert {w.dtype for w in loaded.weights.values()} == {torch.float64}


def test_a_head_that_is_tied_is_not_loaded_twice(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_weights(dataclasses.replace(config, tie_word_embeddings=False))
    assert "lm_head.weight" not in load_model(write_folder(tmp_path / "m", config, tensors), torch.float32).weights


def test_heads_share_the_hidden_size_unless_told(tmp_path):
    assert config_of(folder(tmp_path, head_dim=None)).head_dim == 8


def test_theta_may_lie_inside_rope_parameters(tmp_path):
    path = folder(tmp_path, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert config_of(path).rope_theta == 1e6


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read(tmp_path, key):
    assert config_of(folder(tmp_path, **{key: LLAMA3})).rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_other_rope_scalings_are_refused_by_name(tmp_path, name):
    with pytest.raises(ModelError, match="rope scaling yarn is not supported"):
        config_of(folder(tmp_path, rope_scaling={name: "yarn", "factor": 4.0}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", True), ("mlp_bias", True), ("hidden_act", "gelu"),
     ("partial_rotary_factor", 0.5), ("quantization_config", {"quant_method": "gptq"})],
)  # fmt: skip
def test_settings_that_change_the_arithmetic_are_refused(tmp_path, key, value):
    with pytest.raises(ModelError, match=f"{key}=.* is not supported"):
        config_of(folder(tmp_path, **{key: value}))


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"layer_types": [SLIDING, FULL], "sliding_window": 8}, (8, None)),
        ({"layer_types": [FULL, FULL], "sliding_window": 8}, (None, None)),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, (None, 8)),
        ({"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8}, (None, None)),
        ({"use_sliding_window": False, "max_window_layers": 1, "sliding_window": 8}, (None, None)),
        ({"sliding_window": 8}, (None, None)),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_windows_are_those_that_the_configuration_gives_its_layers(tmp_path, architecture, changes, windows):
    assert config_of(folder(tmp_path, architecture, **changes)).windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [SLIDING, "chunked_attention"]}, "layer type chunked_attention is not supported"),
        ({"layer_types": [SLIDING, FULL]}, "sliding_window=None: sliding layers need a window"),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": False}, "need a window"),
        ({"layer_types": [SLIDING], "sliding_window": 8}, "must name num_layers=2 kinds"),
        ({"use_sliding_window": True, "sliding_window": 8}, "max_window_layers is missing"),
    ],
)
def test_windows_that_make_no_sense_are_refused(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        config_of(folder(tmp_path, **changes))


def test_another_architecture_is_refused_by_name(tmp_path):
    with pytest.raises(
        ModelError, match=r"config\.json: architecture MambaForCausalLM is not supported; use one of Llama"
    ):
        config_of(folder(tmp_path, architectures=["MambaForCausalLM"]))


def test_end_ids_of_both_files_count(tmp_path):
    path = folder(tmp_path, eos_token_id=[261, 260])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [261, 259]}))
    loaded = load_model(path, torch.float32)
    assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids == (261, 260, 259)


def test_end_ids_may_be_a_number_a_list_or_nothing():
    assert eos_ids(2, None) == (2,)
    assert eos_ids(None, [0, 2]) == (0, 2)
    assert eos_ids(None, None) == ()


def test_a_missing_setting_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: num_hidden_layers is missing"):
        config_of(folder(tmp_path, num_hidden_layers=None))


def test_an_impossible_configuration_names_the_folder(tmp_path):
    for changes in ({"num_key_value_heads": 3}, {"vocab_size": "many"}, {"num_attention_heads": 0, "head_dim": None}):
        with pytest.raises(ModelError, match="tiny: its configuration is not usable"):
            config_of(folder(tmp_path, **changes))


def test_a_config_that_is_no_json_is_refused(tmp_path):
    path = folder(tmp_path)
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: can't be read"):
        config_of(path)


def test_a_missing_config_is_refused(tmp_path):
    path = folder(tmp_path)
    (path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: is missing"):
        config_of(path)


def test_a_folder_without_weights_is_refused(tmp_path):
    path = folder(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        open_checkpoint(path)


def test_a_truncated_file_is_refused(tmp_path):
    path = folder(tmp_path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: can't be read .* fetch it again"):
        open_checkpoint(path)


def test_a_missing_shard_is_refused(tmp_path):
    path = folder(tmp_path, shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors: can't be read"):
        open_checkpoint(path)


def test_a_missing_weight_is_named(tmp_path):
    config = tiny_config("qwen2")
    tensors = random_weights(config)
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    with pytest.raises(ModelError, match=r"weight model\.layers\.0\.self_attn\.k_proj\.bias is missing"):
        load_model(write_folder(tmp_path / "tiny", config, tensors), torch.float32)


def test_a_misshapen_weight_is_named_with_both_shapes(tmp_path):
    config = tiny_config()
    tensors = {**random_weights(config), "model.norm.weight": torch.ones(31)}
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(31,\), its configuration says \(32,\)"):
        load_model(write_folder(tmp_path / "tiny", config, tensors), torch.float32)

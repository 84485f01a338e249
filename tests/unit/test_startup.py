"""Start-up: its phases, and the three ways in which memory can be too small, on devices that are made up."""

import itertools
import logging
import threading

import pytest
import torch

from minivllm.calc.hw import GIB
from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.engine.startup import Phases, build_engine, start_engine
from minivllm.models.decoder import Decoder
from minivllm.runner import device_memory
from minivllm.runner.device_memory import DeviceMemory, check_free, profile_step, watch_peak
from minivllm.runner.kv_memory import plan_kv_memory
from tests.byte_tokenizer import ByteTokenizer
from tests.cli_support import write_tiny_model
from tests.random_weights import random_weights

MIB = 2**20
CPU = torch.device("cpu")
LLAMA_70B_HALF = ModelConfig("llama", 128256, 8192, 14336, 80, 32, 4, 128, max_position=131_072)
H100 = DeviceMemory(round(79.18 * GIB), 0, loaded_bytes=70_553_706_496, activation_bytes=3 * GIB)
TINY = ModelConfig("llama", 258, 24, 32, 2, 6, 2, 4, max_position=128)


def tiny_decoder() -> Decoder:
    return Decoder(TINY, random_weights(TINY, dtype=torch.float32), dtype=torch.float32, device="cpu")


def plan(memory: DeviceMemory, model: ModelConfig = LLAMA_70B_HALF, **config: object):
    settings = {"memory_utilization": 0.92, "max_num_batched_tokens": 8192}
    return plan_kv_memory(EngineConfig(**(settings | config)), model, torch.bfloat16, memory)


# three refusals


def test_memory_that_another_program_holds_is_told_before_anything_is_loaded():
    device = DeviceMemory(8 * GIB, used_bytes=3 * GIB)
    with pytest.raises(ConfigError) as error:
        start_engine("no/such-model", EngineConfig(memory_utilization=0.92), device)
    assert str(error.value) == (
        "memory_utilization=0.92: asks for 7.36 GiB of 8.00 GiB, but 5.00 GiB are free; set it to at most 0.62, or end "
        "what takes the other 3.00 GiB"
    )
    check_free(device, EngineConfig(memory_utilization=0.62))


def test_weights_and_a_step_that_leave_nothing_are_told_with_the_least_share_that_would_do():
    device = DeviceMemory(8 * GIB, 0, loaded_bytes=6 * GIB, activation_bytes=GIB)
    with pytest.raises(ConfigError, match=r"take 6\.00 GiB and a step of 8,192 tokens 1\.00 GiB.* -1\.00 GiB for KV"):
        plan(device, memory_utilization=0.75)
    with pytest.raises(ConfigError, match=r"raise it to at least 0\.88"):
        plan(device, memory_utilization=0.87)
    assert plan(device, memory_utilization=0.88).num_blocks > 1


def test_no_share_is_advised_where_all_of_the_device_would_not_do():
    with pytest.raises(ConfigError) as error:
        plan(DeviceMemory(8 * GIB, 0, loaded_bytes=9 * GIB, activation_bytes=GIB))
    assert "raise it" not in str(error.value)
    assert "take a smaller model or dtype" in str(error.value)


def test_row_A25_a_request_of_full_length_does_not_fit_and_the_longest_that_does_is_told():
    with pytest.raises(ConfigError) as error:
        plan(H100, max_model_len=131_072)
    message = str(error.value)
    assert "needs 8,192 blocks of 16 tokens, 20.00 GiB, but memory_utilization gives 1,694, 4.14 GiB" in message
    assert "set max_model_len to at most 27,088, or make room for 15.87 GiB more" in message


def test_row_A25_auto_is_the_longest_and_16384_fits_1_65_times():
    assert plan(H100, max_model_len="auto").max_model_len == 27_088
    assert round(plan(H100, max_model_len=16_384).max_concurrency, 2) == 1.65


def test_row_A17_at_a_share_of_90_percent_the_cache_holds_16736_tokens():
    planned = plan(H100, memory_utilization=0.90, max_model_len="auto")
    assert planned.num_blocks * 16 == 16_736
    assert planned.max_model_len == 16_736 - 16  # block 0 is the null block


def test_a_remainder_too_small_for_a_block_is_told_with_the_setting():
    device = DeviceMemory(8 * GIB, 0, loaded_bytes=4 * GIB, activation_bytes=4 * GIB - 1)
    with pytest.raises(ConfigError, match=r"memory_utilization=1\.0: gives no usable block: 2 are the least"):
        plan(device, memory_utilization=1.0)


def test_a_size_given_for_the_kv_cache_wins_over_a_share_that_is_not_free_and_nothing_is_profiled():
    full = DeviceMemory(GIB, used_bytes=GIB - MIB)
    for size in ({"num_kv_blocks": 9}, {"kv_cache_memory": 2**16}):
        config = EngineConfig(memory_utilization=0.92, block_size=4, **size)
        check_free(full, config)
        engine = build_engine(tiny_decoder(), ByteTokenizer(), config, full)
        assert [phase.name for phase in engine.phases] == ["KV cache"]


# phases


def test_phases_tell_their_time_and_growth_in_order(monkeypatch, caplog):
    held = iter([0, 5 * MIB, 5 * MIB, 4 * MIB, 4 * MIB, 4 * MIB])
    clock = iter([0.0, 1.5, 2.0, 2.25, 2.25, 2.251])
    monkeypatch.setattr("minivllm.engine.startup.held_bytes", lambda device: next(held))
    phases = Phases(CPU, clock.__next__)
    with caplog.at_level(logging.INFO):
        with phases("load weights"):
            pass
        with phases("pack"):
            pass
        with phases("KV cache"):
            pass
    assert phases[:2] == [("load weights", 1.5, 5 * MIB), ("pack", 0.25, -MIB)]
    assert str(phases) == "Started in 1.8 s: load weights 1.50 s, pack 0.25 s."
    assert "start-up: load weights took 1.500 s and +5.0 MiB" in caplog.text


def test_a_phase_that_fails_is_the_last_one():
    phases = Phases(CPU)
    with pytest.raises(ValueError, match="damaged"), phases("load weights"):
        raise ValueError("damaged")
    assert [phase.name for phase in phases] == ["load weights"]


def test_the_profile_runs_only_where_its_result_is_needed():
    decoder, tokenizer = tiny_decoder(), ByteTokenizer()
    plain = build_engine(decoder, tokenizer, EngineConfig(num_kv_blocks=9))
    assert [phase.name for phase in plain.phases] == ["KV cache"]
    shared = EngineConfig(memory_utilization=0.5, max_model_len=64)
    profiled = build_engine(decoder, tokenizer, shared, DeviceMemory(256 * MIB, loaded_bytes=0))
    assert [phase.name for phase in profiled.phases] == ["profile run", "KV cache"]
    made_up = build_engine(decoder, tokenizer, shared, DeviceMemory(16 * MIB, 0, 0, activation_bytes=MIB))
    assert [phase.name for phase in made_up.phases] == ["KV cache"]
    assert made_up.kv_memory.num_blocks == 7 * MIB // made_up.kv_memory.block_bytes


def test_a_model_from_disk_starts_in_these_phases(tmp_path):
    config = EngineConfig(memory_utilization=0.2, max_num_batched_tokens=64, device="cpu")
    engine = start_engine(write_tiny_model(tmp_path), config, DeviceMemory(GIB))
    names = ["resolve model", "config and tokenizer", "load weights", "pack", "profile run", "KV cache"]
    assert [phase.name for phase in engine.phases] == names
    assert engine.kv_memory.source == "memory_utilization"


def test_loading_is_measured_as_growth_unless_the_device_is_made_up(tmp_path, monkeypatch):
    path = write_tiny_model(tmp_path)
    held = itertools.count(0, 1000)
    monkeypatch.setattr("minivllm.engine.startup.held_bytes", lambda device: next(held))
    shared = EngineConfig(memory_utilization=1.0, device="cpu")
    measured = start_engine(path, shared, DeviceMemory(MIB, activation_bytes=0)).kv_memory
    assert measured.num_blocks == (MIB - 4000) // measured.block_bytes
    made_up = start_engine(path, shared, DeviceMemory(MIB, 0, MIB // 2, 0)).kv_memory
    assert made_up.num_blocks == MIB // 2 // made_up.block_bytes


# measuring


def test_the_peak_of_a_block_counts_what_is_given_back_within_it(monkeypatch):
    looked = threading.Event()

    def held_bytes(device):
        if threading.current_thread() is threading.main_thread():
            return 10
        looked.set()
        return 70

    monkeypatch.setattr(device_memory, "held_bytes", held_bytes)
    with watch_peak(CPU) as samples:
        assert looked.wait(timeout=30)
    assert max(samples) - samples[0] == 60
    assert samples[-1] == 10


def test_a_profiled_step_has_the_budgeted_tokens_and_the_rows_that_a_step_samples_at_most(monkeypatch):
    decoder, sizes = tiny_decoder(), []
    forward, logits = decoder.forward, decoder.logits
    monkeypatch.setattr(decoder, "forward", lambda ids, *rest: sizes.append(len(ids)) or forward(ids, *rest))
    monkeypatch.setattr(decoder, "logits", lambda hidden, *rest: sizes.append(len(hidden)) or logits(hidden, *rest))
    assert profile_step(decoder, EngineConfig(max_num_batched_tokens=300, max_num_seqs=5)) >= 0
    assert sizes == [300, 5]

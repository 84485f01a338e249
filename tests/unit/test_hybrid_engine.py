"""A model with windows through the front door: the same answers hybrid on and off, less memory, a trace that replays."""

from dataclasses import replace

import pytest
import torch

from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.course.draw import snapshots
from minivllm.engine.startup import build_engine
from minivllm.kv.hybrid import form_groups
from minivllm.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.plan import EventKind
from minivllm.request import BeamParams, SamplingParams
from minivllm.runner.kv_memory import plan_kv_memory
from minivllm.runner.model_runner import layer_views
from minivllm.sched.trace import read_trace, replay
from tests.byte_tokenizer import ByteTokenizer
from tests.random_weights import random_weights

MODEL = ModelConfig(
    "llama", vocab_size=258, hidden_size=24, intermediate_size=32, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=4,
    max_position=128, sliding_window=9, layer_kinds=("sliding", "full", "sliding", "full"),
)  # fmt: skip
WEIGHTS = random_weights(MODEL, std=0.5, dtype=torch.float64, seed=1)
PROMPTS = ["hello", "a much longer prompt than that: it outgrows the window", "hello", "a much longer prompt, again"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_llm(**config) -> LLM:
    decoder = Decoder(MODEL, WEIGHTS, dtype=torch.float64, device="cpu")
    settings = {"num_kv_blocks": 129, "block_size": 4, "dtype": "float64", "device": "cpu", "check_integrity": True}
    return LLM(engine=build_engine(decoder, ByteTokenizer(), EngineConfig(**(settings | config))))


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def left_behind(llm: LLM) -> int:
    events = llm.engine.core.scheduler.recorder.events
    return sum(len(e.blocks) for e in events if e.kind is EventKind.FREED and e.reason == "window")


@pytest.mark.parametrize("config", [{}, {"attention_backend": "reference"}, {"max_num_batched_tokens": 5}])
def test_on_and_off_answer_the_same(config):
    on, off = make_llm(**config), make_llm(hybrid="off", **config)
    assert answers(on) == answers(off)
    assert answers(on) == answers(off)  # from the prefix cache
    assert left_behind(on) > 0 == left_behind(off)


def test_beams_answer_the_same():
    params = BeamParams(3, 10)
    outputs = [make_llm(hybrid=switch).beam_search(PROMPTS[:2], params) for switch in ("on", "off")]
    on, off = ([(c.token_ids, c.cumulative_logprob) for output in of for c in output.outputs] for of in outputs)
    assert [tokens for tokens, _ in on] == [tokens for tokens, _ in off]
    assert [total for _, total in on] == pytest.approx([total for _, total in off])


def test_a_trace_replays_with_its_groups(tmp_path):
    llm = make_llm(trace_file=str(tmp_path / "trace.jsonl"))
    answers(llm)
    llm.engine.core.scheduler.recorder.close()
    header, events = read_trace(tmp_path / "trace.jsonl")
    assert header.windows == (None, 9)
    assert {event.group for event in events} == {0, 1}
    assert len(list(replay(header, events))) == len(snapshots(llm)) + 1


def test_a_block_holds_its_tokens_in_half_of_the_layers():
    on, off = (
        plan_kv_memory(EngineConfig(num_kv_blocks=65, block_size=4, hybrid=switch), MODEL, torch.float64)
        for switch in ("on", "off")
    )
    assert on.block_bytes * 2 == off.block_bytes
    assert (on.windows, off.windows) == ((None, 9), (None,))
    assert "in each of 2 layer groups" in str(on)
    assert "groups" not in str(off)


def test_the_length_that_fits_counts_all_groups():
    config = EngineConfig(num_kv_blocks=19, block_size=4, max_num_batched_tokens=4)
    memory = plan_kv_memory(config, MODEL, torch.float64)
    assert memory.max_model_len == 4 * (18 - 4)  # a window of 9 and 4 new tokens never hold more than 4 blocks
    assert memory.blocks_per_request == 18
    assert memory.tokens == memory.max_model_len
    with pytest.raises(ConfigError, match=r"needs 19 blocks of 4 tokens.* at most 56"):
        plan_kv_memory(replace(config, max_model_len=57), MODEL, torch.float64)


def test_each_group_needs_a_block():
    with pytest.raises(ConfigError, match="num_kv_blocks=2: gives no usable block: 3 are the least"):
        plan_kv_memory(EngineConfig(num_kv_blocks=2), MODEL, torch.float64)


def test_layers_with_a_window_have_a_view_of_their_own():
    windows = MODEL.windows
    assert layer_views(windows, form_groups(windows)) == ([(1, 9), (0, None)], [(0, 0), (1, 0), (0, 1), (1, 1)])
    assert layer_views(windows, form_groups(windows, "off")) == ([(0, 9), (0, None)], [(0, 0), (1, 1), (0, 2), (1, 3)])
    assert layer_views((None, None), form_groups((None, None))) == ([(0, None)], [(0, 0), (0, 1)])

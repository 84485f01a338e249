"""The engine with a thread for the model: the same answers, and whatever leaves while a step is on its way."""

from dataclasses import asdict
from threading import Event

import pytest
import torch

from minivllm.config import EngineConfig, ModelConfig
from minivllm.engine.startup import build_engine
from minivllm.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.plan import EventKind
from minivllm.request import BeamParams, FinishReason, GuidedRegex, SamplingParams
from minivllm.sched.trace import read_trace, replay
from tests.byte_tokenizer import ByteTokenizer
from tests.random_weights import random_weights

MODEL = ModelConfig(
    "llama", vocab_size=258, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4,
    max_position=128,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "a draw": SamplingParams(seed=3, max_tokens=14),
    "a draw of the engine's seed": SamplingParams(max_tokens=14),
    "penalties": SamplingParams(
        temperature=0, max_tokens=16, repetition_penalty=1.8, frequency_penalty=1.5, presence_penalty=0.5
    ),
    "log-probabilities": SamplingParams(seed=1, max_tokens=8, logprobs=3, prompt_logprobs=2),
    "several answers": SamplingParams(n=3, seed=5, max_tokens=9, logprobs=0, frequency_penalty=1.0),
    "a guide": SamplingParams(seed=2, max_tokens=30, min_tokens=3, guided=GuidedRegex("[a-d]{2,9}")),
    "a guide for several": SamplingParams(n=2, seed=4, max_tokens=20, guided=GuidedRegex("(no|yes)( [0-9]){1,4}")),
    "a stop string": SamplingParams(temperature=0, max_tokens=40, stop=("z", "e", "\x00"), ignore_eos=True),
    "stop ids": SamplingParams(seed=9, max_tokens=40, stop_token_ids=tuple(range(0, 256, 9)), min_tokens=2),
}
PROMPTS = ["hello", "hello world, hello", "x", "to be or not to be"]
CONFIGS = {"roomy": {}, "tight": {"num_kv_blocks": 18, "max_model_len": 64}, "chunks": {"max_num_batched_tokens": 5}}


@pytest.fixture(scope="module")
def decoder():
    return Decoder(MODEL, random_weights(MODEL, std=0.3, dtype=torch.float64), dtype=torch.float64, device="cpu")


def make_llm(decoder, async_depth=1, **config):
    settings = {"num_kv_blocks": 65, "block_size": 4, "dtype": "float64", "device": "cpu", "check_integrity": True}
    config = EngineConfig(**(settings | {"async_depth": async_depth} | config))
    return LLM(engine=build_engine(decoder, ByteTokenizer(), config))


def said(outputs):
    """All but the times, and what the prefix cache happened to hold. Another batch may add numbers in another order."""
    return [rounded(asdict(output) | {"request_id": None, "metrics": None}) for output in outputs]


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value


def assert_idle(llm):
    scheduler = llm.engine.core.scheduler
    assert not llm.engine.core.has_requests
    assert not scheduler.in_flight.plans
    assert not scheduler.in_flight.leaving
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_every_kind_of_request_gets_the_same_answers(decoder, params, config):
    llm = make_llm(decoder, **config)
    assert said(llm.generate(PROMPTS, params)) == said(make_llm(decoder, 0, **config).generate(PROMPTS, params))
    assert_idle(llm)
    completed = [e for e in llm.engine.core.scheduler.recorder.events if e.kind is EventKind.COMPLETED]
    assert any(e.start < e.step for e in completed), "no step was planned ahead"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_all_kinds_together_get_the_same_answers_and_the_trace_replays(decoder, config, tmp_path):
    file = tmp_path / "trace.jsonl"
    llm = make_llm(decoder, trace_file=str(file), **config)
    prompts = [prompt for prompt in PROMPTS[:2] for _ in PARAMS]
    params = [*PARAMS.values()] * 2
    mixed = llm.generate(prompts, params)
    llm.engine.core.scheduler.recorder.close()
    assert said(mixed) == said(make_llm(decoder, 0, **config).generate(prompts, params))
    assert_idle(llm)
    *_, again = replay(*read_trace(file))
    assert not again.has_requests


def test_a_search_beside_ordinary_requests_finds_the_same(decoder):
    answers = []
    for async_depth in (0, 1):
        llm = make_llm(decoder, async_depth)
        core, outputs = llm.engine.core, {}
        for request in (llm.request("plain", GREEDY), llm.request("search", BeamParams(3, 6, ignore_eos=True))):
            core.add(request, lambda output, outputs=outputs: outputs.__setitem__(output.request_id, output))
        while core.has_requests:
            core.step()
        answers.append(said(outputs[key] for key in sorted(outputs)))
    assert answers[0] == answers[1]


# a step on its way


@pytest.fixture
def gated(decoder):
    """An engine whose forwards wait for a gate, and the gate."""
    llm, gate = make_llm(decoder), Event()
    execute = llm.engine.core.runner.execute

    def execute_behind_the_gate(plan):
        gate.wait(30)
        return execute(plan)

    llm.engine.core.runner.execute = execute_behind_the_gate
    yield llm, gate
    gate.set()


def test_the_first_step_comes_back_while_its_forward_runs(gated):
    llm, gate = gated
    core, outputs = llm.engine.core, []
    core.add(llm.request("a", GREEDY), outputs.append)
    assert core.step() == 1
    assert len(core.scheduler.in_flight.plans) == 1
    gate.set()
    while core.has_requests:
        core.step()
    assert len(outputs[0].outputs[0].token_ids) == 12


def test_who_aborts_while_the_forward_runs_hears_nothing_more_and_its_blocks_come_back(gated):
    llm, gate = gated
    core = llm.engine.core
    request = llm.request("a", GREEDY)
    core.add(request, lambda output: pytest.fail("it has left"), stream=True)
    core.step()
    core.abort(request.id)
    assert request.sequences[0].finish_reason is FinishReason.ABORT
    assert core.has_requests, "somebody must step until the forward is over"
    gate.set()
    core.step()
    assert_idle(llm)


def test_an_interrupted_run_leaves_a_usable_engine(decoder):
    llm = make_llm(decoder)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY, on_step=interrupt)
    assert said(llm.generate("a", GREEDY)) == said(make_llm(decoder, 0).generate("a", GREEDY))
    assert_idle(llm)


@pytest.mark.parametrize("part", ["runner", "sampler"])
def test_a_step_that_fails_on_its_way_drops_everybody_and_leaves_no_block_behind(decoder, part):
    llm = make_llm(decoder)
    owner = getattr(llm.engine.core, part)
    name = "execute" if part == "runner" else "sample"
    works = getattr(owner, name)
    calls = []

    def fail_the_third_time(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return works(*args)

    setattr(owner, name, fail_the_third_time)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(["a", "bcdefgh"], GREEDY)
    assert_idle(llm)
    assert said(llm.generate("a", GREEDY)) == said(make_llm(decoder, 0).generate("a", GREEDY))

"""Speculation in the whole engine: the same answers as without, however they end, and what it costs is told."""

from dataclasses import replace

import pytest
import torch

from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.engine.startup import build_engine
from minivllm.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.plan import EventKind
from minivllm.request import BeamParams, FinishReason, GuidedRegex, SamplingParams
from minivllm.sched.trace import read_trace, replay
from tests.byte_tokenizer import ByteTokenizer
from tests.random_weights import random_weights
from tests.unit.test_async_engine import CONFIGS, MODEL, PARAMS, assert_idle, said

PROMPTS = ["hello hello hello", "abcabcabcabc", "x", "to be or not to be"]
DRAFT = ModelConfig(
    "llama", vocab_size=258, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
    max_position=128,
)  # fmt: skip
CERTAIN = {name: params for name, params in PARAMS.items() if params.greedy}


def make_decoder(model, noise=0.0):
    weights, other = (random_weights(model, std=0.3, dtype=torch.float64, seed=seed) for seed in (0, 1))
    mixed = {name: weight + noise * other[name] for name, weight in weights.items()}
    return Decoder(model, mixed, dtype=torch.float64, device="cpu")


@pytest.fixture(scope="module")
def decoder():
    return make_decoder(MODEL)


@pytest.fixture(scope="module")
def near():
    """A model that often says what `decoder` does, and often not."""
    return make_decoder(MODEL, noise=0.04)


def make_llm(decoder, draft=None, **config):
    settings = {"num_kv_blocks": 65, "block_size": 4, "dtype": "float64", "device": "cpu", "check_integrity": True}
    speculation = {"spec_method": "draft", "draft_model": "in memory"} if draft else {"spec_method": "ngram"}
    config = EngineConfig(**(settings | speculation | {"spec_ngram_min": 1} | config))
    return LLM(engine=build_engine(decoder, ByteTokenizer(), config, draft=draft))


def plain(decoder, **config):
    return make_llm(decoder, spec_method="none", **config)


def drafts_of(outputs):
    """How many drafts were run, and how many of them were right."""
    return sum(o.metrics.num_drafts for o in outputs), sum(o.metrics.num_accepted for o in outputs)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_looking_up_drafts_changes_no_answer_greedy_or_drawn(decoder, params, config):
    llm = make_llm(decoder, **config)
    assert said(llm.generate(PROMPTS, params)) == said(plain(decoder, **config).generate(PROMPTS, params))
    assert_idle(llm)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("params", CERTAIN.values(), ids=CERTAIN)
def test_a_draft_model_changes_no_greedy_answer(decoder, near, params, config):
    llm = make_llm(decoder, near, **config)
    outputs = llm.generate(PROMPTS, params)
    assert said(outputs) == said(plain(decoder, **config).generate(PROMPTS, params))
    drafts, accepted = drafts_of(outputs)
    assert 0 < accepted < drafts
    assert_idle(llm)


def test_all_drafts_of_the_same_model_are_accepted_where_it_samples(decoder):
    params = SamplingParams(seed=5, max_tokens=16, ignore_eos=True, top_p=0.9)
    outputs = make_llm(decoder, decoder, spec_tokens=3).generate(PROMPTS, params)
    assert drafts_of(outputs) == (4 * 11, 4 * 11)  # one token, then three times four, then the last three
    assert all(len(output.outputs[0].token_ids) == 16 for output in outputs)


@pytest.mark.parametrize("name", ["a guide", "a guide for several", "penalties", "log-probabilities", "stop ids"])
def test_a_draft_model_goes_with_every_kind_of_sampled_request(decoder, near, name):
    llm = make_llm(decoder, near)
    outputs = llm.generate(PROMPTS, PARAMS[name])
    assert all(completion.finish_reason for output in outputs for completion in output.outputs)
    assert drafts_of(outputs)[0] > 0
    assert_idle(llm)


def test_a_sampled_answer_is_the_same_whatever_runs_beside_it(decoder, near):
    params = SamplingParams(seed=3, max_tokens=14)
    together = make_llm(decoder, near).generate(PROMPTS, params)
    alone = [make_llm(decoder, near).generate(prompt, params)[0] for prompt in PROMPTS]
    assert said(together) == said(alone)


def test_a_text_ends_at_a_stop_string_inside_what_was_accepted(decoder):
    free = plain(decoder).generate("hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    stop = free.text[6]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=(stop,), logprobs=0)
    (output,) = make_llm(decoder, decoder, spec_tokens=12).generate("hello", params)
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, stop)
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
    assert len(answer.logprobs) == len(answer.token_ids) < 13


def test_guides_cut_drafts_that_they_forbid(decoder):
    llm = make_llm(decoder)
    params = SamplingParams(temperature=0, max_tokens=30, guided=GuidedRegex("(ab){4,9}"))
    (output,) = llm.generate("abababab abxabxabx", params)
    (without,) = plain(decoder).generate("abababab abxabxabx", params)
    assert output.outputs == without.outputs
    assert drafts_of([output])[1] > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_what_comes_back_from_host_memory_is_there_for_the_draft_model_too(decoder, preemption):
    """The same model as its own draft: a draft that is wrong would have seen KV of nobody."""
    llm = make_llm(decoder, decoder, num_kv_blocks=18, max_model_len=60, host_kv_blocks=60, preemption=preemption)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert llm.engine.core.scheduler.offload.stats.loaded > 0
    drafts, accepted = drafts_of(outputs)
    assert drafts == accepted > 0


def test_beams_run_without_drafts(decoder):
    llm = make_llm(decoder)
    params = BeamParams(width=3, max_tokens=8)
    assert said(llm.beam_search(PROMPTS, params)) == said(plain(decoder).beam_search(PROMPTS, params))
    assert not [e for e in llm.engine.core.scheduler.recorder.events if e.kind is EventKind.PROPOSED]


def test_acceptance_is_counted_by_place_in_the_row(decoder):
    llm = make_llm(decoder, decoder, spec_tokens=3)
    llm.generate("hello", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    scheduler = llm.engine.core.scheduler
    assert dict(scheduler.num_drafts) == dict(scheduler.num_accepted) == {0: 2, 1: 2, 2: 2}


def test_a_trace_of_speculation_replays(decoder, near, tmp_path):
    for draft in (None, near):
        path = tmp_path / f"{draft is near}.jsonl"
        llm = make_llm(decoder, draft, trace_file=str(path), num_kv_blocks=18, max_model_len=64)
        llm.generate(PROMPTS, [*PARAMS.values()][:4])
        llm.engine.core.scheduler.recorder.close()
        header, events = read_trace(path)
        assert {EventKind.PROPOSED, EventKind.ACCEPTED, EventKind.PREEMPTED} <= {e.kind for e in events}
        assert [*replay(header, events)]


def test_prompts_hit_what_was_accepted_and_nothing_else(decoder):
    llm = make_llm(decoder, decoder)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    first = llm.generate("hello", params)[0]
    longer = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    again = llm.generate(longer, params)[0]
    assert again.metrics.num_cached_tokens >= 16
    assert again.outputs == plain(decoder).generate(longer, params)[0].outputs


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"spec_method": "guess"}, "spec_method"),
        ({"spec_method": "ngram", "async_depth": 1}, "async_depth"),
        ({"spec_method": "draft"}, "draft_model"),
        ({"draft_model": "small"}, "draft_model"),
        ({"spec_tokens": 0}, "spec_tokens"),
        ({"spec_ngram_min": 3, "spec_ngram_max": 2}, "spec_ngram_max"),
    ],
)
def test_what_does_not_go_together_is_refused(config, field):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**config)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"vocab_size": 300}, "draft_model='in memory'"),
        ({"max_position": 64}, "max_model_len"),
        ({"sliding_window": 8}, "block table"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(decoder, change, fault):
    with pytest.raises(ConfigError, match=fault):
        make_llm(decoder, make_decoder(replace(DRAFT, **change)))


def test_a_draft_model_of_another_shape_shares_the_blocks(decoder):
    llm = make_llm(decoder, make_decoder(DRAFT))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert said(llm.generate(PROMPTS, params)) == said(plain(decoder).generate(PROMPTS, params))


def test_kv_memory_counts_the_draft_models_share(decoder):
    bytes_of = [
        llm.engine.kv_memory.bytes_per_token for llm in (plain(decoder), make_llm(decoder, make_decoder(DRAFT)))
    ]
    assert bytes_of[1] - bytes_of[0] == DRAFT.kv_bytes_per_token(8)


SWITCHES = {
    "hits inside a block": {"partial_block_hits": True},
    "published when computed": {"publish_at": "compute"},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 64},
    "priority": {"policy": "priority", "num_kv_blocks": 24, "max_model_len": 64},
    "long prompts in parts": {"long_prefill_threshold": 3},
}


@pytest.mark.parametrize("config", SWITCHES.values(), ids=SWITCHES)
def test_switches_change_no_answer(decoder, near, config):
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, n=n) for n in (1, 2, 1, 3)]
    expected = said(plain(decoder).generate(PROMPTS, params))
    for draft in (None, near):
        llm = make_llm(decoder, draft, **config)
        assert said(llm.generate(PROMPTS, params)) == said(llm.generate(PROMPTS, params)) == expected
        assert_idle(llm)


@pytest.mark.parametrize("hybrid", ["on", "off"])
def test_windows_change_no_answer(hybrid):
    model = replace(MODEL, sliding_window=6, layer_kinds=("full", "sliding"))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    decoder = make_decoder(model)
    llm = make_llm(decoder, hybrid=hybrid)
    outputs = llm.generate(PROMPTS, params)
    assert said(outputs) == said(plain(decoder, hybrid=hybrid).generate(PROMPTS, params))
    drafts, accepted = drafts_of(outputs)
    assert 0 < accepted < drafts

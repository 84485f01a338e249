"""Beam search through the front door, on a tiny decoder in float64: the same answers as a search that shares nothing."""

from functools import cache

import pytest
import torch

from minivllm.config import EngineConfig, ModelConfig, RequestError
from minivllm.engine.startup import build_engine
from minivllm.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.plan import EventKind
from minivllm.request import BeamParams, FinishReason, SamplingParams
from minivllm.sample.sampler import LogitsError
from tests.beam_client import beam_search_client
from tests.byte_tokenizer import ByteTokenizer
from tests.naive_beams import naive_beam_search
from tests.random_weights import random_weights
from tests.reference_decoder import reference_logits

MODEL = ModelConfig(
    "llama", vocab_size=258, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4,
    max_position=64,
)  # fmt: skip
WEIGHTS = random_weights(MODEL, std=0.5, dtype=torch.float64, seed=1)
EOS = next(iter(ByteTokenizer().eos_token_ids))
WEIGHTS["lm_head.weight"][EOS] *= 2  # so that answers do end
PROMPTS = ["hello", "a longer prompt", "hello"]


def make_llm(**config):
    decoder = Decoder(MODEL, WEIGHTS, dtype=torch.float64, device="cpu")
    settings = {"num_kv_blocks": 129, "block_size": 4, "dtype": "float64", "device": "cpu", "check_integrity": True}
    return LLM(engine=build_engine(decoder, ByteTokenizer(), EngineConfig(**(settings | config))))


@pytest.fixture(scope="module")
def llm():
    return make_llm()


@cache
def logprobs(*tokens):
    return reference_logits(MODEL, WEIGHTS, torch.tensor(tokens))[-1].log_softmax(0).tolist()


@cache
def naive(prompt, params):
    return naive_beam_search(lambda tokens: logprobs(*tokens), list(prompt.encode()), params, (EOS,))


def assert_same(output, expected):
    assert [(c.token_ids, c.finish_reason) for c in output.outputs] == [(t, why) for t, _, _, why in expected]
    assert [c.cumulative_logprob for c in output.outputs] == pytest.approx([total for _, total, _, _ in expected])
    assert [c.score for c in output.outputs] == pytest.approx([score for _, _, score, _ in expected])


PARAMS = [
    BeamParams(3, 8),
    BeamParams(1, 6),
    BeamParams(4, 6, length_penalty=0.0),
    BeamParams(2, 8, early_stopping=True),
    BeamParams(3, 7, ignore_eos=True),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_search_finds_the_answers_of_one_that_shares_nothing(llm, params):
    (output,) = llm.beam_search(PROMPTS[1], params)
    assert_same(output, naive(PROMPTS[1], params))


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_client_of_one_token_requests_finds_the_same(llm, params):
    found = beam_search_client(llm.generate, [list(p.encode()) for p in PROMPTS], params, (EOS,))
    inside = llm.beam_search(PROMPTS, params)
    for answers, output in zip(found, inside, strict=True):
        assert_same(output, [(h.token_ids, h.cumulative_logprob, h.score, h.finish_reason) for h in answers])


def test_some_answers_end_and_others_are_cut_off(llm):
    outputs = [llm.beam_search(PROMPTS[1], params)[0] for params in PARAMS]
    assert {c.finish_reason for o in outputs for c in o.outputs} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 3},
        {"block_size": 1},
        {"block_size": 16, "enable_prefix_caching": False},
        {"num_kv_blocks": 15, "max_model_len": 40, "max_num_batched_tokens": 9},
    ],
    ids=str,
)
def test_searches_in_one_batch_find_the_same_whatever_the_configuration(llm, config):
    other = make_llm(**config)
    for output, prompt in zip(other.beam_search(PROMPTS, PARAMS[0]), PROMPTS, strict=True):
        assert_same(output, naive(prompt, PARAMS[0]))
    preempted = any(e.kind is EventKind.PREEMPTED for e in other.engine.core.scheduler.recorder.events)
    assert preempted == ("num_kv_blocks" in config)


def test_a_search_runs_beside_ordinary_requests(llm):
    core, outputs = llm.engine.core, {}
    plain = llm.request("plain", SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
    search = llm.request(PROMPTS[1], PARAMS[0])
    for request in (plain, search):
        core.add(request, lambda output: outputs.__setitem__(output.request_id, output), stream=True)
    while core.has_requests:
        core.step()
    assert_same(outputs[search.id], naive(PROMPTS[1], PARAMS[0]))
    alone = llm.generate("plain", SamplingParams(seed=1, max_tokens=9, ignore_eos=True))[0]
    assert outputs[plain.id].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("partial", [False, True])
def test_a_client_computes_each_beams_partly_full_block_again_unless_hits_may_end_inside_it(partial):
    llm = make_llm(partial_block_hits=partial, lifo_unhashed=False)  # else a tail is overwritten as soon as it is free
    params, prompt = BeamParams(3, 8, ignore_eos=True), list(b"hello")
    beam_search_client(llm.generate, [prompt], params, ())
    scheduled = [e for e in llm.engine.core.scheduler.recorder.events if e.kind is EventKind.SCHEDULED][1:]
    lengths = [len(prompt) + step for step in range(1, 8) for _ in range(3)]
    again = [1 if partial else (length - 1) % 4 + 1 for length in lengths]
    assert [e.tokens for e in scheduled] == again


def test_the_width_of_one_is_greedy(llm):
    (output,) = llm.beam_search("hello", BeamParams(1, 8, ignore_eos=True))
    (greedy,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert output.outputs[0].token_ids == greedy.outputs[0].token_ids


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_texts_leave_out_the_token_that_ended_them_and_no_other(llm, params):
    (output,) = llm.beam_search(PROMPTS[1], params)
    for completion in output.outputs:
        shown = bytes(t for t in completion.token_ids if t < 256).decode("utf-8", "replace")
        assert completion.text == shown


@pytest.mark.parametrize("params", [SamplingParams(), [BeamParams()]])
def test_a_search_takes_beam_params_alone(llm, params):
    with pytest.raises(RequestError, match="must be BeamParams"):
        llm.beam_search("ab", params)


def test_early_stopping_takes_fewer_steps(llm):
    def steps(params):
        before = llm.engine.core.scheduler.recorder.step
        llm.beam_search(PROMPTS[1], params)
        return llm.engine.core.scheduler.recorder.step - before

    assert steps(BeamParams(2, 20, early_stopping=True)) < steps(BeamParams(2, 20)) == 20


def test_the_blocks_held_are_told_beside_what_separate_caches_would_hold(llm):
    metrics = llm.beam_search("a prompt of several blocks", BeamParams(4, 6))[0].metrics
    assert metrics.peak_unshared_blocks == 4 * 8  # 26 + 5 tokens in blocks of 4
    assert 8 + 3 <= metrics.peak_blocks <= 6 + 4 * 2


def test_the_answer_is_capped_by_the_context_that_is_left(llm):
    (output,) = llm.beam_search("x" * 60, BeamParams(2, 50, ignore_eos=True))
    assert [len(c.token_ids) for c in output.outputs] == [4, 4]


def test_a_search_that_can_never_run_is_refused_with_the_reason(llm):
    with pytest.raises(RequestError, match="width=130: needs 260 candidates a beam, there are 258"):
        llm.beam_search("x", BeamParams(130))
    with pytest.raises(RequestError, match="width=4: beams step together: must be at most max_num_batched_tokens=3"):
        make_llm(max_num_batched_tokens=3).beam_search("x", BeamParams(4, 4))
    with pytest.raises(RequestError, match="width=4: must be at most max_num_seqs=3"):
        make_llm(max_num_seqs=3).beam_search("x", BeamParams(4, 4))
    with pytest.raises(RequestError, match=r"width=4: 4 x \(1 prompt \+ 40 new\) tokens can grow to 40 blocks"):
        make_llm(num_kv_blocks=17).beam_search("x", BeamParams(4, 40))


def test_a_bad_prompt_takes_its_place_among_the_results(llm):
    good, bad = llm.beam_search(["fine", "x" * 99], BeamParams(2, 3), errors="return")
    assert len(good.outputs) == 2
    assert isinstance(bad, RequestError)


def test_logits_without_a_largest_number_name_the_request(llm):
    core, request = llm.engine.core, llm.request("x", BeamParams(2, 2))
    request.sequences[0].uid = 0
    with pytest.raises(LogitsError, match=request.id):
        core.sampler.sample(torch.full((1, 258), float("nan")), [tuple(request.sequences)])


def test_a_failing_forward_with_copies_in_flight_leaves_no_block_behind():
    llm = make_llm()
    core, fails = llm.engine.core, []
    execute = core.runner.execute

    def fail_at_a_copy(plan):
        fails.extend(plan.copies)
        return 1 / 0 if plan.copies else execute(plan)

    core.runner.execute = fail_at_a_copy
    with pytest.raises(ZeroDivisionError):
        llm.beam_search("hello", BeamParams(3, 8))
    assert fails
    core.scheduler.integrity()
    pool = core.scheduler.kv.pool
    assert pool.num_free == pool.num_usable

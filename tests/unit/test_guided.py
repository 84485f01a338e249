"""Guided answers from the front door, on a tiny decoder whose own wishes are noise."""

import asyncio
import json
import re
from threading import Event

import jsonschema
import pytest
import torch

from minivllm.config import EngineConfig, ModelConfig, RequestError
from minivllm.engine import grammars
from minivllm.engine.startup import build_engine
from minivllm.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.plan import EventKind
from minivllm.request import FinishReason, GuidedChoice, GuidedJson, GuidedRegex, SamplingParams, Status
from minivllm.sched.trace import read_trace, replay
from tests.byte_tokenizer import ByteTokenizer
from tests.random_weights import random_weights

MODEL = ModelConfig(
    "llama", vocab_size=258, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4,
    max_position=128,
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
}
LARGE = GuidedRegex("(a|b)*a(a|b){30}")
WORDS = GuidedRegex("(ab|cd){2,4}")
FREE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(MODEL, random_weights(MODEL, dtype=torch.float64), dtype=torch.float64, device="cpu")


def make_llm(decoder, tokenizer=None, **config):
    settings = {"num_kv_blocks": 65, "block_size": 4, "dtype": "float64", "device": "cpu", "check_integrity": True}
    return LLM(engine=build_engine(decoder, tokenizer or ByteTokenizer(), EngineConfig(**(settings | config))))


@pytest.fixture
def llm(decoder):
    return make_llm(decoder)


def params(guided, **more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 60, "guided": guided} | more)


def answer(llm, guided, prompt="hello", **more):
    return llm.generate(prompt, params(guided, **more))[0].outputs[0]


# what comes out


def test_a_choice_is_one_of_the_choices(llm):
    said = {answer(llm, GuidedChoice(("yes", "no", "maybe")), temperature=5, seed=seed).text for seed in range(12)}
    assert len(said) > 1
    assert said <= {"yes", "no", "maybe"}


def test_a_regex_is_matched_whole(llm):
    for seed in range(5):
        completion = answer(llm, WORDS, temperature=2, seed=seed)
        assert completion.finish_reason is FinishReason.STOP
        assert re.fullmatch(WORDS.pattern, completion.text)


def test_a_schema_is_followed_and_ends_with_the_end_of_sequence_token(llm):
    completion = answer(llm, GuidedJson(SCHEMA))
    jsonschema.validate(json.loads(completion.text), SCHEMA)
    assert completion.token_ids[-1] == ByteTokenizer.EOS
    assert completion.stop_reason is None


def test_an_answer_that_runs_out_of_tokens_says_so(llm):
    completion = answer(llm, GuidedJson(SCHEMA), max_tokens=5)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.text.startswith('{"nam')


def test_min_tokens_hold_the_end_back_while_there_is_more_to_say(llm):
    assert len(answer(llm, GuidedRegex("a{1,9}"), min_tokens=6).token_ids) >= 6
    completion = answer(llm, GuidedChoice(("yes",)), min_tokens=20)
    assert (completion.text, completion.finish_reason) == ("yes", FinishReason.STOP)


def test_logprobs_are_those_of_what_the_grammar_allows(llm):
    first, second, end = answer(llm, GuidedChoice(("ab", "ac")), logprobs=2).logprobs
    assert first.logprob == 0.0
    assert {token for token, _ in second.top} == {ord("b"), ord("c")}
    assert first.top == ((ord("a"), 0.0),)
    assert end.top == ((ByteTokenizer.EOS, 0.0),)


# in company


def test_guided_and_free_requests_share_a_batch_and_each_gets_its_own_mask(llm, decoder):
    guides = [None, GuidedChoice(("yes", "no")), None, WORDS, GuidedJson(SCHEMA), GuidedJson(SCHEMA)]
    each = [FREE if guide is None else params(guide) for guide in guides]
    together = llm.generate(["a", "b", "c", "d", "e", "f"], each)
    alone = [make_llm(decoder).generate(p, q)[0] for p, q in zip("abcdef", each, strict=True)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.parametrize(
    "config", [{"max_num_batched_tokens": 3}, {"enable_prefix_caching": False}, {"policy": "priority"}]
)
def test_the_schedule_does_not_change_the_answer(decoder, llm, config):
    prompts = ["a long prompt", "another one", "b"]
    each = [params(WORDS, temperature=2, seed=1), FREE, params(GuidedJson(SCHEMA), n=2, temperature=2, seed=2)]
    plain, other = (engine.generate(prompts, each) for engine in (llm, make_llm(decoder, **config)))
    for one, two in zip(plain, other, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in two.outputs]


def test_children_follow_the_grammar_each_for_itself(llm):
    (output,) = llm.generate("hello", params(WORDS, n=4, temperature=3, seed=0))
    assert len({completion.text for completion in output.outputs}) > 1
    assert all(re.fullmatch(WORDS.pattern, completion.text) for completion in output.outputs)


def test_a_preempted_request_goes_on_where_its_grammar_stood(decoder, llm):
    prompts = [f"prompt {i}" for i in range(4)]
    guide = params(GuidedRegex("[a-z]{20,30}"), n=2, temperature=2, seed=3, max_tokens=31)
    tight = make_llm(decoder, num_kv_blocks=33)
    crowded, roomy = tight.generate(prompts, guide), llm.generate(prompts, guide)
    assert tight.engine.core.scheduler.num_preemptions > 0
    assert [[c.text for c in o.outputs] for o in crowded] == [[c.text for c in o.outputs] for o in roomy]


def test_a_trace_of_guided_requests_replays_without_their_grammars(decoder, tmp_path):
    file = tmp_path / "trace.jsonl"
    llm = make_llm(decoder, trace_file=str(file), num_kv_blocks=33)
    llm.generate(["a", "b", "c"], [params(WORDS, n=2, temperature=1, seed=1), FREE, params(GuidedJson(SCHEMA))])
    llm.generate("d", params(LARGE), errors="return")
    llm.engine.core.scheduler.recorder.close()
    header, events = read_trace(file)
    assert sum(event.kind is EventKind.COMPILED for event in events) == 2
    for _ in replay(header, events):
        pass


# waiting and failing


@pytest.fixture
def gate(monkeypatch):
    """Compilation waits until the gate is set."""
    gate = Event()
    compile_grammar = grammars.compile_grammar

    def compile_behind_the_gate(guided, vocabulary):
        gate.wait(30)
        return compile_grammar(guided, vocabulary)

    monkeypatch.setattr(grammars, "compile_grammar", compile_behind_the_gate)
    yield gate
    gate.set()


def test_a_request_that_waits_for_its_grammar_lets_others_pass(llm, gate):
    core, order = llm.engine.core, []
    guided, free = llm.request("a", params(WORDS)), llm.request("b", FREE)
    for request in (guided, free):
        core.add(request, lambda output: order.append(output.request_id))
    while not free.finished:
        assert guided.status is Status.WAITING_FOR_GRAMMAR
        core.step()
    assert list(core.scheduler.waiting) == [guided]
    gate.set()
    while core.has_requests:
        core.step()
    assert order == [free.id, guided.id]


def test_a_request_may_leave_while_its_grammar_is_compiled(llm, gate):
    core = llm.engine.core
    request = llm.request("a", params(WORDS))
    core.add(request, lambda output: pytest.fail("it has left"))
    core.step()
    core.abort(request.id)
    gate.set()
    assert not core.has_requests
    assert answer(llm, WORDS).finish_reason is FinishReason.STOP


def test_requests_that_ask_for_the_same_share_a_grammar(llm, monkeypatch):
    compiled = []
    compile_grammar = grammars.compile_grammar
    monkeypatch.setattr(
        grammars, "compile_grammar", lambda guided, v: compiled.append(guided) or compile_grammar(guided, v)
    )
    llm.generate(["a", "b"], params(GuidedJson(SCHEMA)))
    llm.generate("c", params(GuidedJson(json.dumps(SCHEMA))))
    assert len(compiled) == 1


def test_only_the_last_grammars_are_kept(llm, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_GRAMMARS", 2)
    for word in ("a", "b", "c", "a"):
        assert answer(llm, GuidedChoice((word,))).text == word


def test_a_grammar_that_can_not_be_compiled_fails_its_request_only(llm):
    good, bad, free = llm.generate(["a", "b", "c"], [params(WORDS), params(LARGE), FREE], errors="return")
    assert re.fullmatch(WORDS.pattern, good.outputs[0].text)
    assert isinstance(bad, RequestError)
    assert "too large" in str(bad)
    assert free.finished
    assert not llm.engine.core.has_requests
    with pytest.raises(RequestError, match="too large"):
        llm.generate(["a", "b"], [params(WORDS), params(LARGE)])
    assert not llm.engine.core.has_requests


def test_a_stream_whose_grammar_fails_raises(llm):
    async def collect(guide):
        return [output async for output in llm.stream("a", params(guide))]

    with pytest.raises(RequestError, match="too large"):
        asyncio.run(collect(LARGE))
    assert asyncio.run(collect(WORDS))[-1].finished


def test_a_guide_that_is_not_supported_is_refused_before_anything_runs(llm):
    for guide, why in ((GuidedRegex("(?=a)"), "look-around"), (GuidedJson({"allOf": []}), "#/allOf")):
        with pytest.raises(RequestError, match=why):
            llm.request("a", params(guide))
    assert not llm.engine.core.has_requests


def test_a_model_without_an_end_of_sequence_token_can_not_be_guided(decoder):
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_ids = ()
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        make_llm(decoder, tokenizer).generate("a", params(WORDS))


@pytest.mark.parametrize(("field", "value"), [("stop", ("x",)), ("stop_token_ids", (5,)), ("ignore_eos", True)])
def test_nothing_else_may_end_a_guided_answer(field, value):
    with pytest.raises(RequestError, match=f"{field}=.*can't go with guided"):
        SamplingParams(guided=WORDS, **{field: value})


@pytest.mark.parametrize("guided", ["[a-z]", {"type": "integer"}, ("a", "b")])
def test_a_guide_is_one_of_the_three_kinds(guided):
    with pytest.raises(RequestError, match="must be a GuidedChoice, a GuidedRegex or a GuidedJson"):
        SamplingParams(guided=guided)


@pytest.mark.parametrize("choices", [(), "yes", ("a", 1)])
def test_choices_are_texts(choices):
    with pytest.raises(RequestError, match="at least one text"):
        GuidedChoice(choices)

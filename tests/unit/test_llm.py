"""The front door on a tiny decoder: batches, chat, streams, aborts, and failures that stay where they belong."""

import asyncio

import pytest
import torch

from minivllm.config import EngineConfig, ModelConfig, RequestError
from minivllm.engine.startup import build_engine
from minivllm.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.request import FinishReason, RequestOutput, SamplingParams
from tests.byte_tokenizer import ByteTokenizer
from tests.random_weights import random_weights

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MODEL = ModelConfig(
    "llama", vocab_size=258, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4,
    max_position=128,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(MODEL, random_weights(MODEL, dtype=torch.float64), dtype=torch.float64, device="cpu")


def make_llm(decoder, **config):
    settings = {"num_kv_blocks": 65, "block_size": 4, "dtype": "float64", "device": "cpu", "check_integrity": True}
    return LLM(engine=build_engine(decoder, ByteTokenizer(TEMPLATE), EngineConfig(**(settings | config))))


@pytest.fixture
def llm(decoder):
    return make_llm(decoder)


def text_of(output):
    assert isinstance(output, RequestOutput)
    return output.outputs[0].text


def test_outputs_come_in_the_order_of_the_prompts(llm):
    together = llm.generate(["hello", "a much longer prompt than that", "x"], GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in ["hello", "a much longer prompt than that", "x"]]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert [o.prompt for o in together] == ["hello", "a much longer prompt than that", "x"]


def test_a_list_of_token_ids_is_one_prompt(llm):
    (output,) = llm.generate([104, 105], GREEDY)
    assert text_of(output) == text_of(llm.generate("hi", GREEDY)[0])


def test_chat_renders_the_models_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "user: hi\nassistant:"
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_each_prompt_may_have_its_own_parameters(llm):
    short, long = llm.generate(["a", "b"], [SamplingParams(max_tokens=1, seed=0), GREEDY])
    assert (len(short.outputs[0].token_ids), len(long.outputs[0].token_ids)) == (1, 12)
    with pytest.raises(RequestError, match="params"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_bad_prompt_raises_before_anything_runs(llm):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(["fine", "x" * 500], GREEDY)
    assert not llm.engine.core.has_requests


def test_a_bad_prompt_takes_its_own_place_when_errors_are_returned(llm):
    good, bad, empty = llm.generate(["fine", "x" * 500, ""], GREEDY, errors="return")
    assert text_of(good) == text_of(llm.generate("fine", GREEDY)[0])
    assert isinstance(bad, RequestError)
    assert isinstance(empty, RequestError)


@pytest.mark.parametrize("token", [-1, 258])
def test_token_ids_outside_the_vocabulary_are_refused(llm, token):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate([[1, token]], GREEDY)


def test_max_tokens_is_capped_by_the_context_that_is_left(llm):
    (output,) = llm.generate("x" * 120, SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_stop_strings_cut_text_and_tokens(llm):
    whole = text_of(llm.generate("hello", GREEDY)[0])
    stop = whole[4:6]
    (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,)))
    assert text_of(output) == whole[: whole.index(stop)]
    assert output.outputs[0].finish_reason is FinishReason.STOP
    assert output.outputs[0].stop_reason == stop


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(llm):
    whole = llm.generate("hello", GREEDY)[0].outputs[0]
    assert whole.finish_reason is FinishReason.LENGTH
    (output,) = llm.generate(
        "hello", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=whole.text[-2:])
    )
    assert output.outputs[0].finish_reason is FinishReason.STOP


def test_stop_ids_end_a_sequence_and_are_not_shown(llm):
    tokens = llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    first = tokens.index(tokens[5])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(tokens[5],))
    output = llm.generate("hello", params)[0].outputs[0]
    assert output.token_ids == tokens[: first + 1]
    assert output.stop_reason == tokens[5]
    shown = bytes(t for t in tokens[:first] if t < 256).decode("utf-8", "replace")
    assert output.text == shown


def test_siblings_draw_with_their_own_seeds_and_the_first_is_the_single_answer(llm):
    many = llm.generate("hello", SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True))[0]
    for index in range(3):
        single = llm.generate("hello", SamplingParams(seed=5 + index, max_tokens=8, ignore_eos=True))[0]
        assert many.outputs[index].token_ids == single.outputs[0].token_ids


def test_a_seed_draws_the_same_whatever_else_is_in_the_batch(llm, decoder):
    params = SamplingParams(seed=3, max_tokens=10, ignore_eos=True)
    alone = llm.generate("hello", params)[0].outputs[0].token_ids
    crowd = [SamplingParams(seed=9, max_tokens=20), params, SamplingParams(temperature=0, max_tokens=5)]
    crowded = make_llm(decoder, max_num_batched_tokens=3).generate(["noise", "hello", "more"], crowd)[1]
    assert crowded.outputs[0].token_ids == alone


def test_logprobs_come_with_the_tokens(llm):
    output = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3))[0].outputs[
        0
    ]
    assert [lp.token_id for lp in output.logprobs] == list(output.token_ids)
    assert all(lp.rank == 1 and len(lp.top) == 3 and lp.top[0][1] == lp.logprob for lp in output.logprobs)
    assert output.cumulative_logprob == pytest.approx(sum(lp.logprob for lp in output.logprobs))


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_prompt_logprobs_are_the_same_in_chunks_and_after_a_cached_prefix(decoder, budget):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    whole = make_llm(decoder).generate("hello, engine", params)[0].prompt_logprobs
    chunked = make_llm(decoder, max_num_batched_tokens=budget)
    chunked.generate("hello, engine", GREEDY)
    again = chunked.generate("hello, engine", params)[0].prompt_logprobs
    assert whole[0] is None and again[0] is None  # noqa: PT018
    assert [lp.token_id for lp in again[1:]] == list(b"ello, engine")
    assert [lp.logprob for lp in again[1:]] == pytest.approx([lp.logprob for lp in whole[1:]], abs=1e-9)


def test_prompt_logprobs_survive_a_preemption(decoder):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=0)
    roomy = make_llm(decoder).generate(["abcdefgh", "stuvwxyz"], params)
    tight_llm = make_llm(decoder, num_kv_blocks=11, max_model_len=40, max_num_batched_tokens=5)
    tight = tight_llm.generate(["abcdefgh", "stuvwxyz"], params)
    assert tight_llm.engine.core.scheduler.num_preemptions > 0
    for a, b in zip(roomy, tight, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert [lp.token_id for lp in b.prompt_logprobs[1:]] == list(b.prompt_token_ids[1:])


def test_metrics_tell_cached_tokens(llm):
    llm.generate("hello, my cached engine", GREEDY)
    (again,) = llm.generate("hello, my cached engine", GREEDY)
    assert again.metrics.num_cached_tokens == 20
    assert again.metrics.ttft > 0


def test_progress_is_reported_after_every_step(llm):
    seen = []
    llm.generate(["a", "b"], GREEDY, on_step=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2, 2)
    assert len(seen) == 12


def test_an_interrupted_run_leaves_a_usable_engine(llm):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY, on_step=interrupt)
    assert not llm.engine.core.has_requests
    pool = llm.engine.core.scheduler.kv.pool
    assert pool.num_free == pool.num_usable
    assert text_of(llm.generate("a", GREEDY)[0])


def test_a_failing_forward_drops_what_ran_and_what_it_promised(llm):
    runner = llm.engine.core.runner
    execute, runner.execute = runner.execute, lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm.generate("a prompt with several blocks", GREEDY)
    runner.execute = execute
    assert not llm.engine.core.scheduler.kv.pool.published
    (output,) = llm.generate("a prompt with several blocks", GREEDY)
    assert output.metrics.num_cached_tokens == 0


async def collect(llm, prompt, params):
    return [output async for output in llm.stream(prompt, params)]


def test_a_stream_yields_every_token_and_its_deltas_join_to_the_text(llm):
    outputs = asyncio.run(collect(llm, "hello", GREEDY))
    assert len(outputs) == 12
    assert "".join(o.outputs[0].delta for o in outputs) == outputs[-1].outputs[0].text
    assert outputs[-1].outputs[0].text == text_of(llm.generate("hello", GREEDY)[0])
    assert [o.finished for o in outputs] == [False] * 11 + [True]


def test_streams_run_in_one_batch(llm):
    async def several():
        return await asyncio.gather(*(collect(llm, prompt, GREEDY) for prompt in ("a", "bb", "ccc")))

    texts = [outputs[-1].outputs[0].text for outputs in asyncio.run(several())]
    assert texts == [text_of(o) for o in llm.generate(["a", "bb", "ccc"], GREEDY)]


def test_leaving_a_stream_aborts_its_request_and_no_other(llm):
    async def leave():
        other = asyncio.create_task(collect(llm, "other", GREEDY))
        stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        return await other

    outputs = asyncio.run(leave())
    assert outputs[-1].finished
    assert not llm.engine.core.has_requests
    assert not llm.engine.core.outputs._listeners, "who left is still listened for"
    pool = llm.engine.core.scheduler.kv.pool
    assert pool.num_free == pool.num_usable


def test_a_failing_step_reaches_every_stream(llm):
    llm.engine.core.runner.execute = lambda plan: 1 / 0

    async def both():
        return await asyncio.gather(*(collect(llm, p, GREEDY) for p in "ab"), return_exceptions=True)

    assert [type(r) for r in asyncio.run(both())] == [ZeroDivisionError] * 2


def test_a_bad_stream_raises_and_disturbs_nobody(llm):
    async def both():
        return await asyncio.gather(collect(llm, "x" * 500, GREEDY), collect(llm, "a", GREEDY), return_exceptions=True)

    bad, good = asyncio.run(both())
    assert isinstance(bad, RequestError)
    assert good[-1].finished

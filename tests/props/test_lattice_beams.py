"""The lattice for beams: whatever the configuration, a search finds what the naive one finds, and each cell proves its point."""

from functools import cache
from itertools import product
from random import Random

import pytest
import torch

from minivllm.config import EngineConfig
from minivllm.engine.startup import build_engine
from minivllm.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.models.fetch import resolve_model
from minivllm.models.loader import load_model
from minivllm.plan import EventKind
from minivllm.request import BeamParams, Request, SamplingParams
from minivllm.sample.beam import finished_answers
from tests.beam_client import beam_search_client
from tests.lattice import Cell, make_scheduler, num_blocks, of, refused, run
from tests.naive_beams import BeamIntegerModel, integer_logprobs, naive_beam_search

VOCAB, EOS, LENGTH = 30, 0, 24
BUDGETS = (3, 7, 64)
WIDTH = 3

CELLS = [
    cell
    for values in product((1, 4, 16), BUDGETS, *[(True, False)] * 4, ("fcfs", "priority"))
    if not refused(cell := Cell(LENGTH, *values))
]


def workload() -> list[Request]:
    """A long plain request and one of two answers among searches that start alike, one of them asked twice."""
    random = Random(5)
    shared = [random.randrange(1, VOCAB) for _ in range(9)]
    wide = BeamParams(WIDTH, 10, length_penalty=0.5)
    narrow = BeamParams(2, 12, ignore_eos=True)
    requests = [
        Request("plain", shared[:5], SamplingParams(ignore_eos=True), max_tokens=LENGTH - 5, priority=1),
        Request("wide", shared, wide.sampling, max_tokens=10, beams=wide, priority=2),
        Request("narrow", [*shared[:8], 7], narrow.sampling, max_tokens=12, beams=narrow, priority=0),
        Request("forked", shared[:7], SamplingParams(n=2, ignore_eos=True), max_tokens=9, priority=1),
        Request("again", shared, wide.sampling, max_tokens=10, beams=wide, priority=1),
    ]
    return requests


@cache
def expected():
    logprobs = integer_logprobs(VOCAB)
    return {
        r.id: naive_beam_search(logprobs, r.prompt_token_ids, r.beams, (EOS,))
        for r in workload()
        if r.beams is not None
    }


def search(cell: Cell):
    requests = workload()
    scheduler = make_scheduler(cell, requests, EOS)
    model = BeamIntegerModel(num_blocks(cell, requests), cell.block_size, VOCAB)
    model.eos = (EOS,)
    run(cell, scheduler, requests, model.execute)
    found = {
        r.id: [(h.token_ids, h.cumulative_logprob, h.score, h.finish_reason) for h in finished_answers(r)]
        for r in requests
        if r.beams
    }
    return found, requests, scheduler


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_configuration_finds_the_answers_of_a_search_that_shares_nothing(cell):
    check_search(cell)


def check_search(cell: Cell) -> None:
    found, requests, scheduler = search(cell)
    assert found == expected()
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    prove(cell, requests, list(scheduler.recorder.events))


def prove(cell, requests, events):
    """Beams forked from each other, copied on write, came together; and where memory is short, some had to leave and catch up."""
    searches = {r.id for r in requests if r.beams}
    forks = [e for e in of(events, EventKind.FORKED) if e.request in searches]
    assert {e.request for e in forks} == searches
    assert any(e.parent for e in forks), "no beam forked from another than the trunk"
    copied = {e.request for e in of(events, EventKind.COPIED)}
    assert (copied & searches == searches) == (cell.block_size > 1)
    preempted = {e.request for e in of(events, EventKind.PREEMPTED)}
    # a budget as small as the width leaves a search no company: then memory need not run short
    assert not (preempted & searches) or (cell.tight and cell.mixed)
    assert preempted & searches or not (cell.tight and cell.mixed and cell.budget > WIDTH), "no search was preempted"


def test_the_workload_ends_answers_both_ways_and_tells_searches_apart():
    reasons = {reason for answers in expected().values() for *_, reason in answers}
    assert len(reasons) == 2
    assert expected()["wide"] == expected()["again"] != expected()["narrow"]
    assert len(CELLS) >= 100


@pytest.mark.model
def test_smollm2_finds_the_same_answers_as_separate_uncached_requests():
    loaded = load_model(resolve_model(None), torch.float32)
    decoder = Decoder(loaded.config, loaded.weights, dtype=torch.float32, device="cpu")

    def engine(**config):
        return LLM(
            engine=build_engine(decoder, loaded.tokenizer, EngineConfig(dtype="float32", num_kv_blocks=100, **config))
        )

    params, prompts = BeamParams(4, 12), ["The capital of France is", "1, 2, 3, 4,"]
    plain = engine(enable_prefix_caching=False)
    ids = [loaded.tokenizer.encode_prompt(prompt) for prompt in prompts]
    expected = beam_search_client(
        lambda texts, one: [plain.generate(text, one)[0] for text in texts], ids, params, loaded.tokenizer.eos_token_ids
    )
    for output, answers in zip(
        engine(block_size=4, max_model_len=64).beam_search(prompts, params), expected, strict=True
    ):
        assert [c.token_ids for c in output.outputs] == [h.token_ids for h in answers]
        assert [c.score for c in output.outputs] == pytest.approx([h.score for h in answers], abs=1e-4)

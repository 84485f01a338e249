"""The lattice with grammars: guided and free requests together, the same tokens however their steps are laid out.

What is expected is found without automata: a grammar's texts are listed, and a byte may follow if some text goes on so.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch

from minivllm.config import EngineConfig, MinivllmError
from minivllm.engine.core import Inline
from minivllm.engine.grammars import Grammars
from minivllm.engine.startup import build_engine
from minivllm.models.decoder import Decoder
from minivllm.plan import EventKind, TraceEvent
from minivllm.request import GuidedChoice, GuidedRegex, Request, SamplingParams
from minivllm.sample.sampler import Sampler
from tests.byte_tokenizer import ByteTokenizer
from tests.lattice import Cell, Tokens, num_blocks, of
from tests.props import test_lattice_decoder as decoder
from tests.random_weights import random_weights
from tests.reference_decoder import reference_logits

VOCAB, EOS, LENGTH = 258, ByteTokenizer.EOS, 32
MODEL = replace(decoder.MODEL, vocab_size=VOCAB)
MODES = {
    "plain": {},
    "ahead": {"async_depth": 1},
    "drafts": {"spec_method": "ngram", "spec_tokens": 3},
    "draft model": {"spec_method": "draft", "draft_model": "itself", "spec_tokens": 3},
    "swap": {"host_kv_blocks": 40, "preemption": "swap"},
    "partial": {"partial_block_hits": True},
}
CHOICES = ("yes", "yesterday", "no")
PAIRS = tuple(map("".join, (pair for n in range(2, 6) for pair in product(("ab", "cd"), repeat=n))))
ROUNDS = tuple("xyz" * n for n in range(1, 6))
TEXTS = {"choice": CHOICES, "pairs": PAIRS, "rounds": ROUNDS, "again": ROUNDS}
"""Of each guided request, all that it may say."""


@dataclass(frozen=True, slots=True)
class GuidedCell(Cell):
    """A cell in one of the modes."""

    mode: str

    def __str__(self) -> str:
        return f"{Cell.__str__(self)}-{self.mode}"

    @property
    def config(self) -> EngineConfig:
        return replace(Cell.config.fget(self), dtype="float64", device="cpu", **MODES[self.mode])


both = (True, False)
CELLS = [
    GuidedCell(LENGTH, size, budget, caching, tight, mixed, True, "fcfs", mode)
    for (size, budget), caching, tight, mixed, mode in product(((1, 64), (4, 7)), both, both, both, MODES)
    if (caching or mode not in ("swap", "partial")) and (mixed or mode != "draft model")
]


def workload() -> list[Request]:
    """Three ask for the same beginning, two for the same altogether; one has two answers, one is free."""
    shared = list(b"a shared beg")

    def guided(guide, temperature=0.0, n=1) -> SamplingParams:
        return SamplingParams(guided=guide, temperature=temperature, seed=1, n=n)

    free = SamplingParams(temperature=0, ignore_eos=True)
    rounds = guided(GuidedRegex("(xyz){1,5}"))
    return [
        Request("choice", [*shared, 1], guided(GuidedChoice(CHOICES)), max_tokens=18),
        Request("pairs", shared, guided(GuidedRegex("(ab|cd){2,5}"), 2.0, n=2), max_tokens=18),
        Request("free", [*shared, 2], free, max_tokens=18),
        Request("rounds", list(b"long prompt, 16."), rounds, max_tokens=16),
        Request("again", list(b"long prompt, 16."), rounds, max_tokens=16),
    ]


def allowed(request: Request, said: list[int]) -> list[int]:
    """The tokens that may follow, from the list of texts."""
    if request.id not in TEXTS:
        return list(range(VOCAB))
    text = bytes(said).decode()
    following = {goes_on[len(text)] for goes_on in TEXTS[request.id] if goes_on.startswith(text) and goes_on != text}
    return sorted(map(ord, following)) + [EOS] * (text in TEXTS[request.id])


@cache
def weights():
    return random_weights(MODEL, std=0.5, dtype=torch.float64, seed=3)


@cache
def expected() -> Tokens:
    """What a cache-free decoder says, one sequence after the other, with all else set to -inf."""
    sampler = Sampler((EOS,), VOCAB)
    for request in (requests := workload()):
        for sequence in request.sequences:
            said = sequence.output_token_ids
            while len(said) < request.max_tokens and (request.id == "free" or EOS not in said):
                logits = reference_logits(MODEL, weights(), torch.tensor(request.prompt_token_ids + said))[-1].float()
                mask = torch.full_like(logits, -torch.inf)
                mask[allowed(request, said)] = 0
                ((token,),) = sampler.sample((logits + mask)[None], [(sequence,)])
                said.append(token.token_id)
    return {(r.id, s.index): s.output_token_ids for r in requests for s in r.sequences}


def say(cell: GuidedCell) -> tuple[Tokens, list[TraceEvent]]:
    """Run the workload in an engine whose grammars are compiled at once, so that a cell has one schedule."""
    requests = workload()
    config = replace(cell.config, num_kv_blocks=num_blocks(cell, requests), max_model_len=LENGTH)
    model = Decoder(MODEL, weights(), dtype=torch.float64, device="cpu")
    draft = model if config.draft_model else None
    core = build_engine(model, ByteTokenizer(), config, draft=draft).core
    core.grammars._pool = Inline()  # else a thread decides in which step a request joins
    for batch in [requests] if cell.mixed else [[request] for request in requests]:
        for request in batch:
            core.add(request, lambda output: None)
        while core.has_requests:
            core.step()
    return {(r.id, s.index): s.output_token_ids for r in requests for s in r.sequences}, list(
        core.scheduler.recorder.events
    )


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_guided_requests_say_the_same_under_every_configuration(cell):
    """What is drawn at random over a draft model's proposals comes out differently, yet must be one of the texts."""
    said, events = say(cell)
    drawn = {key: tokens for key, tokens in said.items() if key[0] == "pairs"}
    if cell.mode == "draft model":
        assert all(bytes(text).decode() in PAIRS and end == EOS for *text, end in drawn.values())
        said |= {key: expected()[key] for key in drawn}
    assert said == expected()
    prove(cell, events)


def prove(cell: GuidedCell, events: list[TraceEvent]) -> None:
    kinds = {event.kind for event in events}
    assert len(of(events, EventKind.COMPILED)) == len(TEXTS)
    assert (EventKind.HIT in kinds) == cell.caching
    full = cell.tight and cell.mixed
    assert (EventKind.PREEMPTED in kinds) == full or (full and cell.mode == "draft model"), "its answers may be shorter"
    assert (EventKind.ACCEPTED in kinds) == (cell.mode in ("drafts", "draft model"))


def test_stops_are_late_and_preemptions_drop_tokens_of_guided_requests_too():
    events = [event for cell in CELLS if cell.mode == "ahead" and cell.tight and cell.mixed for event in say(cell)[1]]
    dropped = {(event.reason, event.request in TEXTS) for event in of(events, EventKind.DROPPED)}
    assert dropped >= {("finished", True), ("preempted", True)}


@pytest.mark.parametrize("name", TEXTS)
def test_an_answer_is_one_of_the_texts_and_the_end(name):
    *text, end = expected()[name, 0]
    assert bytes(text).decode() in TEXTS[name]
    assert end == EOS


def share_a_matcher(self, sequence):
    """Siblings do."""
    return self._matchers[sequence.request.id][0]


def mask_the_row_before(self, groups):
    rows, masks = original_masks(self, groups)
    return [max(row - 1, 0) for row in rows], masks


def forget_drafts(self, sequence):
    """A row with drafts has the same mask for each of them."""
    return self._matcher(sequence).row()


original_masks = Grammars.masks
FAULTS = [("_matcher", share_a_matcher), ("masks", mask_the_row_before), ("_row", forget_drafts)]


@pytest.mark.parametrize(("function", "fault"), FAULTS)
def test_a_seeded_fault_is_found(function, fault, monkeypatch):
    monkeypatch.setattr(Grammars, function, fault)
    some = [cell for cell in CELLS if cell.mode == "drafts" and cell.mixed and cell.caching]
    try:
        said = [say(cell)[0] for cell in some]
    except MinivllmError as error:
        said = [str(error)]
    assert any(answer != expected() for answer in said)

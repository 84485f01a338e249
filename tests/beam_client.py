"""Beam search as a client of an engine that knows no beams: one-token requests, as the leading engine's front end sends them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from minivllm.request import BeamParams, Hypothesis, RequestOutput, SamplingParams
from minivllm.sample.beam import (
    Beam,
    Candidate,
    Likeliest,
    answers,
    best,
    complete,
    expand,
    is_done,
    num_candidates,
    select,
)

Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]
"""Answers prompts of token ids, in their order: `LLM.generate`, or a server behind HTTP."""


@dataclass(slots=True)
class Search:
    """What the client knows of one prompt's search."""

    prompt: list[int]
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    completed: list[Hypothesis] = field(default_factory=list)

    def advance(self, likeliest: Many[Likeliest], params: BeamParams, ends: Collection[int]) -> None:
        """One step: `likeliest[i]` are the next tokens that beam i offers."""
        going_on, ended = select(expand(self.beams, likeliest), params.width, ends)
        completed = [complete(self.beams[c.parent], c, len(self.prompt), params) for c in ended]
        self.completed = best([*self.completed, *completed], params.width)
        self.beams = [_grown(self.beams[c.parent], c) for c in going_on]


def _grown(beam: Beam, candidate: Candidate) -> Beam:
    return Beam((*beam.token_ids, candidate.token_id), (*beam.logprobs, candidate.logprob))


def beam_search_client(
    generate: Generate, prompts: Many[list[int]], params: BeamParams, eos_token_ids: Collection[int]
) -> list[list[Hypothesis]]:
    """Beam search as a client of an engine that knows no beams: for each prompt its answers, best first.

    Every step asks for one token after each beam, with log-probabilities. Each request is a new one: it sends all its
    tokens again, is hashed and scheduled again, and computes its last, partly full block again. Source: vLLM 0.32,
    `entrypoints/generate/beam_search/offline.py`. Raises `RequestError` as `generate` does.
    """
    ends = frozenset[int]() if params.ignore_eos else frozenset(eos_token_ids)
    ask = SamplingParams(temperature=0, max_tokens=1, logprobs=num_candidates(params.width, len(ends)))
    searches = [Search(list(prompt)) for prompt in prompts]
    for _ in range(params.max_tokens):
        running = [s for s in searches if not is_done(s.completed, params)]
        outputs = iter(
            generate([s.prompt + list(b.token_ids) for s in running for b in s.beams], ask) if running else ()
        )
        for search in running:
            search.advance([_likeliest(next(outputs)) for _ in search.beams], params, ends)
    return [answers(s.completed, s.beams, len(s.prompt), params) for s in searches]


def _likeliest(output: RequestOutput) -> Likeliest:
    """What a one-token answer says of the token's rivals."""
    (entry,) = output.outputs[0].logprobs or ()
    return entry.top

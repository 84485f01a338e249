"""Beam search: the likeliest answers that can be found with `width` of them in hand at a time.

Each step every live beam offers its likeliest next tokens. Candidates that end an answer leave the race as complete
ones; of the others the `width` with the largest sum of log-probabilities live on, whoever their parents are. A beam
offers `2 * width` candidates, since it may be the only parent of all that live on, and some of what it offers may end.

The log-probabilities are compared as sums while beams live: they have the same length. Complete answers have not, so they
are compared by `score`. Its length counts the prompt's tokens too and leaves out the token that ended the answer: that is
what the leading engine does (vLLM 0.32, `entrypoints/generate/beam_search/utils.py`; Hugging Face's counts generated
tokens only, so that the same `length_penalty` means more there).

The engine runs beams inside: they fork and prune block tables, share KV down to the token, and compute one token each a
step. The leading engine has none of that. Its client loops over one-token requests with log-probabilities, which find
each other's full blocks in the prefix cache and compute the partly full one again. Both forms find the same answers:
the tests hold the engine to such a client (`tests/beam_client.py`). Left out: sampling among candidates, diversity groups,
several constraints a beam, and the bound that would prove that no live beam can win any more.

No torch here: everything is a function of token ids and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from minivllm.request import (
    BeamParams,
    FinishReason,
    Hypothesis,
    Request,
    SampledToken,
    Sequence,
    TokenLogprob,
)

Likeliest = Many[tuple[int, float]]
"""(token id, natural log-probability), the likeliest first."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A live beam: the tokens after the prompt, and the log-probability of each."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def cumulative_logprob(self) -> float:
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Beam number `parent` with one more token, the `rank`-th likeliest (from 1) after it."""

    parent: int
    token_id: int
    logprob: float
    rank: int
    cumulative_logprob: float


# one step


def num_candidates(width: int, num_ends: int) -> int:
    """How many next tokens each beam must offer so that `width` of them go on, whatever it offers of `num_ends` end tokens.

    The usual `2 * width` is not enough for a model with more end tokens than beams.
    """
    return max(2 * width, width + num_ends)


def expand(beams: Many[Beam], likeliest: Many[Likeliest]) -> list[Candidate]:
    """All candidates of all beams, best first: by cumulative log-probability, equal ones by their tokens.

    `likeliest[i]` are the next tokens that beam i offers. The order depends on the beams alone, not on how they are
    numbered: whoever searches finds the same.
    """
    candidates = [
        Candidate(i, token, logprob, rank, beam.cumulative_logprob + logprob)
        for i, (beam, offered) in enumerate(zip(beams, likeliest, strict=True))
        for rank, (token, logprob) in enumerate(offered, 1)
    ]
    return sorted(candidates, key=lambda c: (-c.cumulative_logprob, beams[c.parent].token_ids, c.token_id))


def select(
    candidates: Iterable[Candidate], width: int, ends: Collection[int]
) -> tuple[list[Candidate], list[Candidate]]:
    """(the `width` best that go on, all that end with a token of `ends`); `candidates` come best first."""
    going_on, ended = list[Candidate](), list[Candidate]()
    for candidate in candidates:
        (ended if candidate.token_id in ends else going_on).append(candidate)
    return going_on[:width], ended


def assign_slots(parents: Many[int], slots: Many[int]) -> list[int]:
    """The slot of each child: a parent's first child stays in its parent's, the others take those that nobody continues.

    `parents[i]` is the slot of child i's parent; as many children as slots. So a beam that goes on keeps its block table,
    and as few tables as possible are forked: one for each beam that is pruned.
    """
    spare = iter([slot for slot in slots if slot not in set(parents)])
    seen: set[int] = set()
    places = []
    for parent in parents:
        places.append(next(spare) if parent in seen else parent)
        seen.add(parent)
    return places


# complete answers


def score(cumulative_logprob: float, length: int, length_penalty: float) -> float:
    """What complete answers are sorted by: `cumulative_logprob / length ** length_penalty`, the larger the better.

    `length` in tokens, at least 1. Log-probabilities are negative: the larger the penalty, the better do long answers fare;
    0 compares bare sums. Source: Wu et al., "Google's neural machine translation system", 2016, simplified.
    """
    return cumulative_logprob / length**length_penalty


def best(hypotheses: Iterable[Hypothesis], width: int) -> list[Hypothesis]:
    """The `width` best complete answers, best first; equal ones by their tokens."""
    return sorted(hypotheses, key=lambda h: (-h.score, h.token_ids))[:width]


def complete(beam: Beam, candidate: Candidate, num_prompt: int, params: BeamParams) -> Hypothesis:
    """The answer that `candidate`, which ends its parent `beam`, makes. The end token is in it but not in its length."""
    total = candidate.cumulative_logprob
    length = num_prompt + len(beam.token_ids)
    tokens = (*beam.token_ids, candidate.token_id)
    return Hypothesis(tokens, total, score(total, length, params.length_penalty), FinishReason.STOP)


def cut_off(beam: Beam, num_prompt: int, params: BeamParams) -> Hypothesis:
    """The answer that a beam makes which is still live after `max_tokens` tokens."""
    total = beam.cumulative_logprob
    length = num_prompt + len(beam.token_ids)
    return Hypothesis(beam.token_ids, total, score(total, length, params.length_penalty), FinishReason.LENGTH)


def is_done(hypotheses: Many[Hypothesis], params: BeamParams) -> bool:
    """Whether a search may end before its beams are full: only with `early_stopping`, with `width` answers complete."""
    return params.early_stopping and len(hypotheses) >= params.width


def answers(
    hypotheses: Many[Hypothesis], beams: Iterable[Beam], num_prompt: int, params: BeamParams
) -> list[Hypothesis]:
    """What a search returns: the best of the complete answers and of the beams still live, unless it ended early."""
    live = [] if is_done(hypotheses, params) else [cut_off(beam, num_prompt, params) for beam in beams]
    return best([*hypotheses, *live], params.width)


# inside the engine: a request's sequences are the beams


def beam_of(sequence: Sequence) -> Beam:
    """A sequence of a beam search as a `Beam`."""
    return Beam(tuple(sequence.output_token_ids), tuple(entry.logprob for entry in sequence.logprobs))


def choose_beams(
    parents: Many[Sequence], children: Many[Sequence], likeliest: Many[Likeliest], ends: Collection[int]
) -> list[SampledToken]:
    """The next token of each of `children`, with the parent that it continues; completed answers go to the request.

    `parents` are all live beams of one request, or the trunk alone after the prompt; `children` the sequences that draw,
    which are the same ones or all that fork from the trunk. `likeliest[i]` are the tokens that `parents[i]` offers.
    """
    request, beams = parents[0].request, [beam_of(s) for s in parents]
    assert request.beams is not None
    going_on, ended = select(expand(beams, likeliest), len(children), ends)
    completed = [complete(beams[c.parent], c, len(request.prompt_token_ids), request.beams) for c in ended]
    request.hypotheses = best([*request.hypotheses, *completed], request.beams.width)
    places = assign_slots([parents[c.parent].index for c in going_on], [s.index for s in children])
    chosen = {}
    for slot, candidate in zip(places, going_on, strict=True):
        parent = parents[candidate.parent].index
        stays = slot == parent or len(parents) < len(children)  # forks from the trunk have nothing to take over
        entry = TokenLogprob(candidate.token_id, candidate.logprob, candidate.rank)
        chosen[slot] = SampledToken(candidate.token_id, entry, None if stays else parent)
    return [chosen[s.index] for s in children]


def finished_answers(request: Request) -> list[Hypothesis]:
    """The answers of a request whose search has ended."""
    assert request.beams is not None
    cut = [beam_of(s) for s in request.sequences if s.finish_reason is FinishReason.LENGTH]
    return answers(request.hypotheses, cut, len(request.prompt_token_ids), request.beams)

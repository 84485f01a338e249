"""A beam search that shares nothing and caches nothing, written from the definition: the second opinion of all beam tests."""

from __future__ import annotations

from collections.abc import Callable, Collection

from minivllm.plan import StepPlan
from minivllm.request import BeamParams, FinishReason, Sequence
from minivllm.sample.beam import choose_beams
from tests.integer_model import IntegerModel, first_layer, fold, mix

Answer = tuple[tuple[int, ...], float, float, FinishReason]
"""(tokens, sum of log-probabilities, score, why it ended)."""

Logprobs = Callable[[list[int]], list[float]]
"""All tokens of a text -> the log-probability of each token that may follow."""


def naive_beam_search(logprobs: Logprobs, prompt: list[int], params: BeamParams, eos: Collection[int]) -> list[Answer]:
    """The `width` best answers, best first. Every step computes every beam anew from its first token."""
    ends = () if params.ignore_eos else eos
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(params.max_tokens):
        grown = []
        for tokens, total in beams:
            table = logprobs(prompt + tokens)
            offered = sorted(range(len(table)), key=lambda t: (-table[t], t))[
                : max(2 * params.width, params.width + len(ends))
            ]
            grown += [([*tokens, t], total + table[t]) for t in offered]
        ended += [(tokens, total) for tokens, total in grown if tokens[-1] in ends]
        alive = [(tokens, total) for tokens, total in grown if tokens[-1] not in ends]
        beams = sorted(alive, key=lambda beam: (-beam[1], beam[0]))[: params.width]
        if params.early_stopping and len(ended) >= params.width:
            beams = []
            break
    answers = [_answer(*a, len(prompt) - 1, params, FinishReason.STOP) for a in ended]
    answers += [_answer(*a, len(prompt), params, FinishReason.LENGTH) for a in beams]
    return sorted(answers, key=lambda a: (-a[2], a[0]))[: params.width]


def _answer(tokens: list[int], total: float, uncounted: int, params: BeamParams, reason: FinishReason) -> Answer:
    return tuple(tokens), total, total / (len(tokens) + uncounted) ** params.length_penalty, reason


# beams of the integer model


def logprobs_of(state: int, vocab_size: int) -> list[float]:
    """Made-up log-probabilities, exact in binary and few, so that ties do happen."""
    return [-(mix(state, token) >> 40) % 4096 / -64 for token in range(vocab_size)]


def integer_logprobs(vocab_size: int) -> Logprobs:
    return lambda tokens: logprobs_of(fold(fold(first_layer(tokens)))[-1], vocab_size)


class BeamIntegerModel(IntegerModel):
    """The integer model for plans with beams among the rows: their next tokens are chosen over all beams of a request."""

    eos: tuple[int, ...] = ()

    def execute(self, plan: StepPlan):
        states = self.run(plan)
        chosen = self._choose([(row, state) for row, state in states if row.sequence.request.beams])
        return [
            [chosen[s] for s in row.samples] if row.sequence.request.beams else self._draw(row.samples, state)
            for row, state in states
        ]

    def _choose(self, states) -> dict[Sequence, object]:
        chosen: dict[Sequence, object] = {}
        for request in {row.sequence.request for row, _ in states}:
            mine = [(row, state) for row, state in states if row.sequence.request is request]
            children = [s for row, _ in mine for s in row.samples]
            ends = () if request.params.ignore_eos else self.eos
            offered = [self._offer(state, max(2 * len(children), len(children) + len(ends))) for _, state in mine]
            tokens = choose_beams([row.sequence for row, _ in mine], children, offered, ends)
            chosen |= dict(zip(children, tokens, strict=True))
        return chosen

    def _offer(self, state: int, k: int) -> list[tuple[int, float]]:
        table = logprobs_of(state, self.vocab_size)
        return [(t, table[t]) for t in sorted(range(self.vocab_size), key=lambda t: (-table[t], t))[:k]]

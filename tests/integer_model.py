"""A model made of integers: exact, fast, and so sensitive that one wrong KV slot changes the text.

Two "layers" keep one integer a slot each. The first depends on a token and its position; the second folds over what
the first layer's slots of all earlier positions really hold; the next token folds over the second layer's. So a slot's
content depends on the whole prefix, as KV does in a real decoder, and reading a neighbour's slot, a stale one or
one at another position gives another number.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from minivllm.plan import Row, StepPlan
from minivllm.request import Request, SampledToken

MASK = 2**64 - 1


def mix(state: int, value: int) -> int:
    """A 64-bit number that depends on both and on their order."""
    state = (state * 6364136223846793005 + value + 1442695040888963407) & MASK
    return (state ^ (state >> 29)) * 0xBF58476D1CE4E5B9 & MASK


def fold(values: Iterable[int]) -> list[int]:
    """Running folds: entry p depends on values 0 .. p and their order."""
    return list(accumulate(values, mix, initial=1))[1:]


def first_layer(tokens: Iterable[int], start: int = 0) -> list[int]:
    return [mix(token, position) for position, token in enumerate(tokens, start)]


def choose(state: int, index: int, vocab_size: int) -> int:
    """The next token of child `index`: siblings with the same context draw different tokens."""
    return (mix(state, index) >> 20) % vocab_size


def plain_tokens(request: Request, index: int, vocab_size: int, eos: int) -> list[int]:
    """What child `index` of a request should say: everything anew for each token, no cache, no batch."""
    tokens, params = list(request.prompt_token_ids), request.params
    drawn: list[int] = []
    while len(drawn) < request.max_tokens:
        state = fold(fold(first_layer(tokens + drawn)))[-1]
        drawn.append(choose(state, index, vocab_size))
        if drawn[-1] in params.stop_token_ids or (drawn[-1] == eos and not params.ignore_eos):
            break
    return drawn


class IntegerModel:
    """Executes plans as a runner does: copies, then layer by layer all writes, then all reads."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size, self.vocab_size = block_size, vocab_size
        self.layers = [[0] * (num_blocks * block_size) for _ in range(2)]

    def execute(self, plan: StepPlan) -> list[list[SampledToken]]:
        """The tokens drawn: one list for each row with samples."""
        return [self._draw(row, state) for row, state in self.run(plan)]

    def run(self, plan: StepPlan) -> list[tuple[Row, int]]:
        """Each row with samples, and the state that it draws from."""
        for layer in self.layers:
            self._copy(layer, plan.copies)
        first, second = self.layers
        for row in plan.rows:
            self._write(first, row, first_layer(row.token_ids, row.start))
        folds = [fold(self._read(first, row)) for row in plan.rows]
        for row, states in zip(plan.rows, folds, strict=True):
            self._write(second, row, states[row.start :])
        return [(row, fold(self._read(second, row))[-1]) for row in plan.rows if row.samples]

    def _draw(self, row: Row, state: int) -> list[SampledToken]:
        return [SampledToken(choose(state, sequence.index, self.vocab_size)) for sequence in row.samples]

    def _slot(self, row: Row, position: int) -> int:
        return row.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, layer: list[int], row: Row, values: list[int]) -> None:
        for position, value in enumerate(values, row.start):
            layer[self._slot(row, position)] = value

    def _read(self, layer: list[int], row: Row) -> list[int]:
        return [layer[self._slot(row, position)] for position in range(row.stop)]

    def _copy(self, layer: list[int], pairs: list[tuple[int, int]]) -> None:
        size = self.block_size
        sources = [layer[source * size : (source + 1) * size] for source, _ in pairs]
        for content, (_, target) in zip(sources, pairs, strict=True):
            layer[target * size : (target + 1) * size] = content

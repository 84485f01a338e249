"""A model made of integers: exact, fast, and so sensitive that one wrong KV slot changes the text.

Two "layers" keep one integer a slot each. The first depends on a token and its position; the second folds over what
the first layer's slots of all earlier positions really hold; the next token folds over the second layer's. So a slot's
content depends on the whole prefix, as KV does in a real decoder, and reading a neighbour's slot, a stale one or
one at another position gives another number. Either layer may have a window: it folds over the last positions only. Layers
of different groups keep their numbers in the same slots, as pages of one pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import reduce
from itertools import accumulate

from minivllm.kv.hybrid import Windows, form_groups
from minivllm.plan import Row, StepPlan
from minivllm.request import Request, SampledToken, Sequence
from minivllm.sample.spec import keep_matching

MASK = 2**64 - 1


def mix(state: int, value: int) -> int:
    """A 64-bit number that depends on both and on their order."""
    state = (state * 6364136223846793005 + value + 1442695040888963407) & MASK
    return (state ^ (state >> 29)) * 0xBF58476D1CE4E5B9 & MASK


def fold(values: Seq[int], window: int | None = None, start: int = 0) -> list[int]:
    """Running folds from entry `start` on: entry p depends on values 0 .. p and their order, or on the last `window` of them."""
    if window is None:
        return list(accumulate(values, mix, initial=1))[1 + start :]
    return [reduce(mix, values[max(p + 1 - window, 0) : p + 1], 1) for p in range(start, len(values))]


def first_layer(tokens: Iterable[int], start: int = 0) -> list[int]:
    return [mix(token, position) for position, token in enumerate(tokens, start)]


def choose(state: int, index: int, vocab_size: int) -> int:
    """The next token of child `index`: siblings with the same context draw different tokens."""
    return (mix(state, index) >> 20) % vocab_size


def plain_tokens(request: Request, index: int, vocab_size: int, eos: int, windows: Windows = (None, None)) -> list[int]:
    """What child `index` of a request should say: everything anew for each token, no cache, no batch."""
    tokens, params = list(request.prompt_token_ids), request.params
    drawn: list[int] = []
    while len(drawn) < request.max_tokens:
        state = fold(fold(first_layer(tokens + drawn), windows[0]), windows[1])[-1]
        drawn.append(choose(state, index, vocab_size))
        if drawn[-1] in params.stop_token_ids or (drawn[-1] == eos and not params.ignore_eos):
            break
    return drawn


class IntegerModel:
    """Executes plans as a runner does: copies, then layer by layer all writes, then all reads."""

    def __init__(
        self, num_blocks: int, block_size: int, vocab_size: int, windows: Windows = (None, None), hybrid: str = "on"
    ) -> None:
        self.block_size, self.vocab_size, self.windows = block_size, vocab_size, windows
        groups = form_groups(windows, hybrid)
        self.group_of = [next(g for g, group in enumerate(groups) if layer in group.layers) for layer in range(2)]
        pages = [[0] * (num_blocks * block_size) for _ in groups[0].layers]
        self.layers = [pages[groups[g].layers.index(layer)] for layer, g in enumerate(self.group_of)]
        self.pages = pages
        self.host: list[dict[int, list[int]]] = [{} for _ in pages]

    def execute(self, plan: StepPlan) -> list[list[SampledToken]]:
        """The tokens drawn: one list for each row with samples."""
        states = [state for _, state in self.run(plan)]
        return keep_matching(plan, [self._draw(group, state) for group, state in zip(plan.groups, states, strict=True)])

    def run(self, plan: StepPlan) -> list[tuple[Row, int]]:
        """Each row with samples, and the state that it draws from; a row with drafts comes once more for each."""
        for page, host in zip(self.pages, self.host, strict=True):
            self._move(page, host, plan)
            self._copy(page, plan.copies)
        for row in plan.rows:
            self._write(0, row, first_layer(row.token_ids, row.start))
        folds = [fold(self._read(0, row), self.windows[0], row.start) for row in plan.rows]
        for row, states in zip(plan.rows, folds, strict=True):
            self._write(1, row, states)
        drawing = [row for row in plan.rows if row.samples]
        states = [fold(self._read(1, row), self.windows[1], row.stop - len(row.drafts) - 1) for row in drawing]
        return [(row, state) for row, several in zip(drawing, states, strict=True) for state in several]

    def _draw(self, group: tuple[Sequence, ...], state: int) -> list[SampledToken]:
        return [SampledToken(choose(state, sequence.index, self.vocab_size)) for sequence in group]

    def _slots(self, layer: int, row: Row) -> list[int]:
        """Slot of each position up to the row's end, through the table of the layer's group."""
        table, size = (row.block_ids, *row.more_block_ids)[self.group_of[layer]], self.block_size
        return [table[position // size] * size + position % size for position in range(row.stop)]

    def _write(self, layer: int, row: Row, values: list[int]) -> None:
        for slot, value in zip(self._slots(layer, row)[row.start :], values, strict=True):
            self.layers[layer][slot] = value

    def _read(self, layer: int, row: Row) -> list[int]:
        """What the layer's slots hold; the null block's, where a window doesn't reach, are never folded."""
        return [self.layers[layer][slot] for slot in self._slots(layer, row)]

    def _move(self, page: list[int], host: dict[int, list[int]], plan: StepPlan) -> None:
        """Out to host memory, and back from it; a host slot that was never written can't be read."""
        size = self.block_size
        for block, slot in plan.stores:
            host[slot] = page[block * size : (block + 1) * size]
        for slot, block in plan.loads:
            page[block * size : (block + 1) * size] = host[slot]

    def _copy(self, layer: list[int], pairs: list[tuple[int, int]]) -> None:
        """A runner may copy pairs in any order, or at once: no block is a target twice, or both source and target."""
        size, targets = self.block_size, {target for _, target in pairs}
        assert len(targets) == len(pairs), pairs
        assert targets.isdisjoint(source for source, _ in pairs), pairs
        sources = [layer[source * size : (source + 1) * size] for source, _ in pairs]
        for content, (_, target) in zip(sources, pairs, strict=True):
            layer[target * size : (target + 1) * size] = content

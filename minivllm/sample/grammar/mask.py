"""Which tokens may come next: an automaton over bytes against a vocabulary, as one bit a token.

A token is allowed if the text can still be finished after it, and finished *with tokens that this vocabulary has*. An
automaton knows bytes, a model says tokens, and the two differ where a byte has no token of its own (SmolLM2 lacks six
control characters and the first bytes of some planes of Unicode): a token that leads to where only such a byte could
follow would leave nothing to say next. So a state is live if some tokens lead from it to an accepting one.

Rows are packed: bit i % 32 of word i // 32, lowest first, is token i's. That is xgrammar's layout and so vLLM's, 6,144
bytes for SmolLM2 and 16,032 for Llama 3. A row depends on the automaton's state alone and is kept for its next visit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, arange, from_numpy, inference_mode, uint8

from minivllm.sample.grammar.automaton import DEAD, START, Automaton
from minivllm.sample.grammar.vocabulary import Vocabulary

MAX_ROWS = 4096
WORD = 32

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
Row = NDArray[np.int32]


class Grammar:
    """A language over one vocabulary: where tokens lead, and which of them are allowed."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.accepting = automaton.accepting
        self._class_of = automaton.class_of
        self._classes = automaton.class_of[vocabulary.byte].astype(np.int64)
        reachable = reaching(self._edges(automaton.table, vocabulary.byte[1:]), automaton.accepting)
        self._table = np.where(reachable[automaton.table], automaton.table, DEAD)
        self.live = self._find_live(reachable)
        self._rows: dict[int, Row] = {}

    @property
    def num_states(self) -> int:
        return len(self.live)

    @property
    def is_empty(self) -> bool:
        """Whether no text of the language can be written with this vocabulary."""
        return not self.live[START]

    def _edges(self, table: NDArray[np.int32], usable: NDArray[np.uint8]) -> tuple[IntArray, IntArray]:
        """(from, to) of all steps over one of the usable bytes."""
        columns = table[:, np.unique(self._class_of[usable])]
        return np.repeat(np.arange(len(table)), columns.shape[1]), columns.ravel().astype(np.int64)

    def _find_live(self, reachable: BoolArray) -> BoolArray:
        """Bool [states]: whether tokens lead to an accepting state.

        Steps over bytes that are tokens by themselves settle nearly all states at once. Only for those that are
        `reachable` over the bytes of the vocabulary, but not over such single ones, all tokens are tried.
        """
        sources, targets = self._edges(self._table, self.vocabulary.single_bytes)
        live = reaching((sources, targets), self.accepting)
        for state in np.flatnonzero(reachable & ~live):
            ends = np.unique(self.walk(int(state))[self.vocabulary.token_nodes])
            sources, targets = np.append(sources, np.full(len(ends), state)), np.append(targets, ends)
        return reaching((sources, targets), self.accepting)

    def walk(self, state: int) -> NDArray[np.int32]:
        """The state after each node of the trie, from `state` on; int32 [nodes], DEAD where nothing leads."""
        trie, num_classes = self.vocabulary, self._table.shape[1]
        table = self._table.ravel()
        reached = np.zeros(len(trie.parent), np.int32)
        reached[0] = state
        nodes = trie.children(np.zeros(1, np.int64))
        while len(nodes):
            reached[nodes] = table[reached[trie.parent[nodes]].astype(np.int64) * num_classes + self._classes[nodes]]
            nodes = trie.children(nodes[reached[nodes] != DEAD])
        return reached

    def step(self, state: int, token_id: int) -> int:
        """The state after one more token, which is none that ends a text; DEAD if the token is not allowed."""
        if token_id not in self.vocabulary.texts:
            return DEAD
        for byte in self.vocabulary.texts[token_id]:
            state = int(self._table[state, self._class_of[byte]])
        return state if self.live[state] else DEAD

    def row(self, state: int) -> Row:
        """The allowed tokens at a state, packed; int32 [ceil(vocabulary / 32)], not to be written to.

        End-of-sequence tokens are allowed exactly at accepting states. Bits beyond the vocabulary are 0.
        """
        if state not in self._rows:
            if len(self._rows) == MAX_ROWS:
                self._rows.pop(next(iter(self._rows)))
            self._rows[state] = self._compute_row(state)
        return self._rows[state]

    def _compute_row(self, state: int) -> Row:
        vocabulary = self.vocabulary
        allowed = np.zeros(-(-vocabulary.size // WORD) * WORD, np.bool_)
        allowed[vocabulary.token_ids] = self.live[self.walk(state)[vocabulary.token_nodes]]
        allowed[list(vocabulary.eos_token_ids)] = self.accepting[state]
        return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


def reaching(edges: tuple[IntArray, IntArray], goals: BoolArray) -> BoolArray:
    """Bool [states]: from which states a goal is reached; goals reach themselves. `edges` are (from [E], to [E])."""
    sources, targets = edges
    order = np.argsort(targets, kind="stable")
    sources = sources[order]
    begins = np.searchsorted(targets[order], np.arange(len(goals) + 1))
    reached = goals.copy()
    todo = np.flatnonzero(goals).tolist()
    while todo:
        target = todo.pop()
        before = sources[begins[target] : begins[target + 1]]
        new = np.unique(before[~reached[before]])
        reached[new] = True
        todo += new.tolist()
    return reached


@inference_mode()  # where the logits were made, too: only there may they be written to
def apply_masks(logits: Tensor, rows: list[int], masks: NDArray[np.int32]) -> None:
    """Make what the masks leave out impossible: -inf in place, in these rows of `logits` [R, V].

    `masks` are packed, int32 [len(rows), ceil(V / 32)]; they travel packed to where the logits are. A row that is
    allowed everything holds -1 in every word. Source of the layout: vLLM 0.32,
    `v1/worker/gpu/structured_outputs.py`, where one kernel unpacks and writes.
    """
    packed = from_numpy(masks).to(logits.device).view(uint8)  # a quarter of the memory to unpack into
    bit_of = (1 << arange(8, device=logits.device)).to(uint8)
    forbidden = ((packed.unsqueeze(2) & bit_of) == 0).flatten(1)[:, : logits.shape[1]]
    for row, mask in zip(rows, forbidden, strict=True):
        logits[row].masked_fill_(mask, float("-inf"))

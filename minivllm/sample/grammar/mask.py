"""Which tokens may come next: an automaton over bytes against a vocabulary, as one bit a token.

A token is allowed if the text can still be finished after it, and finished *with tokens that this vocabulary has*. An
automaton knows bytes, a model says tokens, and the two differ where a byte has no token of its own (SmolLM2 lacks six
control characters and the first bytes of some planes of Unicode): a token that leads to where only such a byte could
follow would leave nothing to say next. So a state is live if some tokens lead from it to an accepting one.

Rows are packed: bit i % 32 of word i // 32, lowest first, is token i's. That is xgrammar's layout and so vLLM's, 6,144
bytes for SmolLM2 and 16,032 for Llama 3. A row depends on the automaton's state alone and is kept for its next visit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, arange, from_numpy, inference_mode, uint8

from minivllm.config import MinivllmError
from minivllm.sample.grammar.automaton import DEAD, START, Automaton
from minivllm.sample.grammar.vocabulary import Vocabulary

MAX_ROWS = 4096
WORD = 32
ENDED = -1

BoolArray = NDArray[np.bool_]
Edges = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(from [E], to [E])"""
Row = NDArray[np.int32]


class Grammar:
    """A language over one vocabulary: where tokens lead, and which of them are allowed. `live` is bool [states]."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.accepting = automaton.accepting
        self._classes = automaton.class_of[vocabulary.byte]
        reachable = reaching(edges_over(automaton, vocabulary.byte[1:]), automaton.accepting)
        self._automaton = replace(automaton, table=np.where(reachable[automaton.table], automaton.table, DEAD))
        self.live = self._find_live(reachable)
        self._cached_row = lru_cache(MAX_ROWS)(self._compute_row)

    @property
    def is_empty(self) -> bool:
        """Whether no text of the language can be written with this vocabulary."""
        return not self.live[START]

    def _find_live(self, reachable: BoolArray) -> BoolArray:
        """Bool [states]: whether tokens lead to an accepting state.

        Steps over bytes that are tokens by themselves settle nearly all states at once. Only for those that are
        `reachable` over the bytes of the vocabulary, but not over such single ones, all tokens are tried.
        """
        sources, targets = edges_over(self._automaton, self.vocabulary.single_bytes)
        live = reaching((sources, targets), self.accepting)
        for state in np.flatnonzero(reachable & ~live):
            ends = np.unique(self.walk(int(state))[self.vocabulary.token_nodes])
            sources, targets = np.append(sources, np.full(len(ends), state)), np.append(targets, ends)
        return reaching((sources, targets), self.accepting)

    def walk(self, state: int) -> NDArray[np.int32]:
        """The state after each node of the trie, from `state` on; int32 [nodes], DEAD where nothing leads."""
        trie, table = self.vocabulary, self._automaton.table
        reached = np.zeros(len(trie.parent), np.int32)
        reached[0] = state
        nodes = trie.children(np.zeros(1, np.int64))
        while len(nodes):
            reached[nodes] = table[reached[trie.parent[nodes]], self._classes[nodes]]
            nodes = trie.children(nodes[reached[nodes] != DEAD])
        return reached

    def step(self, state: int, token_id: int) -> int:
        """The state after one more token, which is none that ends a text; DEAD if the token is not allowed."""
        if token_id not in self.vocabulary.texts:
            return DEAD
        state = self._automaton.run(self.vocabulary.texts[token_id], state)
        return state if self.live[state] else DEAD

    def row(self, state: int) -> Row:
        """The allowed tokens at a state, packed; int32 [ceil(vocabulary / 32)], not to be written to.

        End-of-sequence tokens are allowed exactly at accepting states. Bits beyond the vocabulary are 0.
        """
        return self._cached_row(state)

    def _compute_row(self, state: int) -> Row:
        vocabulary = self.vocabulary
        allowed = np.zeros(-(-vocabulary.size // WORD) * WORD, np.bool_)
        allowed[vocabulary.token_ids] = self.live[self.walk(state)[vocabulary.token_nodes]]
        allowed[list(vocabulary.eos_token_ids)] = self.accepting[state]
        return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


class GrammarError(MinivllmError):
    """A token came that the mask had forbidden: a fault of the engine."""


class Matcher:
    """Follows a sequence through its grammar, token by token, and back.

    It has *ended* once it took an end-of-sequence token. Then everything is allowed and changes nothing.
    """

    __slots__ = ("_grammar", "_states")

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._states = [START]  # one for the start and one for each token taken

    @property
    def ended(self) -> bool:
        return self._states[-1] == ENDED

    def accept(self, token_id: int) -> None:
        """Take one token. Raises `GrammarError`, and stays where it is, if the token is not allowed."""
        self._states.append(self._after(token_id))

    def accept_prefix(self, token_ids: list[int]) -> int:
        """Take tokens up to the first that is not allowed; how many they are."""
        for number, token in enumerate(token_ids):
            try:
                self.accept(token)
            except GrammarError:
                return number
        return len(token_ids)

    @property
    def num_taken(self) -> int:
        return len(self._states) - 1

    def _after(self, token_id: int) -> int:
        state, vocabulary = self._states[-1], self._grammar.vocabulary
        if state == ENDED:
            return ENDED
        if token_id in vocabulary.eos_token_ids:
            following = ENDED if self._grammar.accepting[state] else DEAD
        else:
            following = self._grammar.step(state, token_id)
        if following == DEAD:
            raise GrammarError(f"token {token_id} ({vocabulary.texts.get(token_id)!r}) is not allowed by the grammar")
        return following

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens. Raises `ValueError` if so many were not taken."""
        if not 0 <= num_tokens < len(self._states):
            raise ValueError(f"num_tokens={num_tokens}: {len(self._states) - 1} were taken")
        del self._states[len(self._states) - num_tokens :]

    def row(self) -> Row:
        """The tokens that `accept` would take now, packed as in `Grammar.row`; -1 in every word once it has ended."""
        if self.ended:
            return np.full(-(-self._grammar.vocabulary.size // WORD), -1, np.int32)
        return self._grammar.row(self._states[-1])


def edges_over(automaton: Automaton, usable: NDArray[np.uint8]) -> Edges:
    """All steps over one of the usable bytes."""
    columns = automaton.table[:, np.unique(automaton.class_of[usable])]
    return np.repeat(np.arange(len(columns)), columns.shape[1]), columns.ravel().astype(np.int64)


def reaching(edges: Edges, goals: BoolArray) -> BoolArray:
    """Bool [states]: from which states a goal is reached; goals reach themselves."""
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

"""Where one sequence stands in its grammar."""

from __future__ import annotations

import numpy as np

from minivllm.config import MinivllmError
from minivllm.sample.grammar.automaton import DEAD, START
from minivllm.sample.grammar.mask import WORD, Grammar, Row

ENDED = -1


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

"""The grammars of running requests: compiled aside, one matcher a sequence, masks for a step.

In the leading engine (vLLM 0.32, `v1/structured_output/__init__.py:StructuredOutputManager`) this sits in the same
place, the engine's own thread: workers only apply what it fills. Compilation goes to a pool of threads while the request
waits; masks are filled once the forward is launched, so that on a GPU they cost nothing as long as they take less. Left
out: filling more than 128 rows with several threads, which pays off only for a library that lets go of Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property

import numpy as np
from torch import Tensor

from minivllm.config import RequestError
from minivllm.request import Guided, Request, SampledToken, SamplingParams, Sequence
from minivllm.sample.grammar.compile import compile_grammar, language_of
from minivllm.sample.grammar.mask import Grammar, apply_masks
from minivllm.sample.grammar.matcher import Matcher
from minivllm.sample.grammar.vocabulary import Vocabulary, build_vocabulary

MAX_GRAMMARS = 64


class Grammars:
    """Compiles what requests ask for, and follows their sequences. For one thread at a time, except `check` and `wait`.

    The last 64 grammars are kept: requests that ask for the same share one, also while it is being compiled.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        vocab_size: int,
        special_ids: Collection[int],
        eos_token_ids: Collection[int],
    ) -> None:
        self._vocabulary_source = (token_bytes, vocab_size, special_ids, eos_token_ids)
        self._eos_token_ids = eos_token_ids
        self._pool = ThreadPoolExecutor(max(1, ((os.cpu_count() or 1) + 1) // 2), "grammar")
        self._grammars: dict[Guided, Future[Grammar]] = {}
        self._waiting: dict[str, tuple[Request, Future[Grammar]]] = {}
        self._matchers: dict[str, list[Matcher]] = {}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary as a trie: made for the first grammar, in the thread that compiles it."""
        return self.build_vocabulary()

    def build_vocabulary(self) -> Vocabulary:
        """A new trie of the model's vocabulary; takes about a tenth of a second for 49,152 tokens."""
        return build_vocabulary(*self._vocabulary_source)

    def check(self, params: SamplingParams) -> None:
        """Raise `RequestError` if `params` ask for what no grammar can be made of. Call it before a request runs."""
        if params.guided is None:
            return
        language_of(params.guided)
        if not self._eos_token_ids:
            raise RequestError("guided", params.guided, "this model has no end-of-sequence token to end an answer with")

    def add(self, request: Request) -> None:
        """Begin to compile for a request, if it is guided."""
        guided = request.params.guided
        if guided is None:
            return
        grammar = self._grammars.pop(guided, None) or self._pool.submit(self._compile, guided)
        self._grammars[guided] = grammar  # again the youngest
        if len(self._grammars) > MAX_GRAMMARS:
            self._grammars.pop(next(iter(self._grammars)))
        self._waiting[request.id] = request, grammar

    def _compile(self, guided: Guided) -> Grammar:
        return compile_grammar(guided, self.vocabulary)

    def take_compiled(self) -> list[tuple[str, Exception | None]]:
        """The ids of requests whose grammar is compiled since the last call, or the error with which that failed."""
        taken: list[tuple[str, Exception | None]] = []
        for request, grammar in [entry for entry in self._waiting.values() if entry[1].done()]:
            del self._waiting[request.id]
            try:
                self._matchers[request.id] = [Matcher(grammar.result()) for _ in request.sequences]
                taken.append((request.id, None))
            except Exception as error:
                taken.append((request.id, error))
        return taken

    def wait(self, seconds: float) -> None:
        """Sleep until a grammar is compiled, for so long at most; at once back if none is being compiled."""
        waiting = list(self._waiting.values())  # in one go: whoever steps or adds meanwhile changes it
        wait([grammar for _, grammar in waiting], seconds, FIRST_COMPLETED)

    def mask(self, logits: Tensor, groups: Many[tuple[Sequence, ...]]) -> None:
        """Make the tokens that grammars forbid impossible, in place, in a step's `logits` [R, V], R == len(groups).

        Sequences of one group are children that have drawn nothing yet: all are at the beginning of their grammar.
        """
        rows = [i for i, group in enumerate(groups) if group[0].request.id in self._matchers]
        if rows:
            masks = np.stack([self._matcher(groups[i][0]).row() for i in rows])
            apply_masks(logits, rows, masks)

    def accept(self, drawn: Many[tuple[Sequence, SampledToken]]) -> None:
        """Advance the matchers by a step's tokens, and drop those of finished requests.

        Raises `GrammarError` for a token that was forbidden.
        """
        for sequence, token in drawn:
            if sequence.request.id in self._matchers:
                self._matcher(sequence).accept(token.token_id)
        for sequence, _ in drawn:
            if sequence.request.finished:
                self.forget(sequence.request.id)

    def _matcher(self, sequence: Sequence) -> Matcher:
        return self._matchers[sequence.request.id][sequence.index]

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request: it is over."""
        self._waiting.pop(request_id, None)
        self._matchers.pop(request_id, None)

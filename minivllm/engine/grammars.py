"""The grammars of running requests: compiled aside, one matcher a sequence, masks for a step.

In the leading engine (vLLM 0.32, `v1/structured_output/__init__.py:StructuredOutputManager`) this sits in the same
place, the engine's own thread: workers only apply what it fills. Compilation goes to a pool of threads while the request
waits; masks are filled once the forward is launched, so that on a GPU they cost nothing as long as they take less. Left
out: filling more than 128 rows with several threads, which pays off only for a library that lets go of Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from minivllm.config import RequestError
from minivllm.request import Guided, GuidedChoice, GuidedRegex, Request, SampledToken, SamplingParams, Sequence
from minivllm.sample.grammar.automaton import TooLargeError, build_automaton
from minivllm.sample.grammar.mask import Grammar, Matcher
from minivllm.sample.grammar.regex import PatternError, parse_regex
from minivllm.sample.grammar.schema import parse_schema
from minivllm.sample.grammar.syntax import Alt, Node, concat
from minivllm.sample.grammar.vocabulary import Vocabulary

Masks = tuple[list[int], NDArray[np.int32]]
MAX_GRAMMARS = 64


class Grammars:
    """Compiles what requests ask for, and follows their sequences. For one thread at a time, except `check` and `wait`.

    The last 64 grammars are kept: requests that ask for the same share one, also while it is being compiled.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], *, can_end: bool) -> None:
        self.make_vocabulary = make_vocabulary
        self._can_end = can_end
        self._pool = ThreadPoolExecutor(max(1, ((os.cpu_count() or 1) + 1) // 2), "grammar")
        self._submitted = lru_cache(MAX_GRAMMARS)(self._submit)
        self._waiting: dict[str, tuple[Request, Future[Grammar]]] = {}
        self._matchers: dict[str, list[Matcher]] = {}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary as a trie: made for the first grammar, in the thread that compiles it."""
        return self.make_vocabulary()

    def check(self, params: SamplingParams) -> None:
        """Raise `RequestError` if `params` ask for what no grammar can be made of. Call it before a request runs."""
        if params.guided is None:
            return
        language_of(params.guided)
        if not self._can_end:
            raise RequestError("guided", params.guided, "this model has no end-of-sequence token to end an answer with")

    def add(self, request: Request) -> None:
        """Begin to compile for a request, if it is guided."""
        if request.params.guided is not None:
            self._waiting[request.id] = request, self._submitted(request.params.guided)

    def _submit(self, guided: Guided) -> Future[Grammar]:
        return self._pool.submit(lambda: compile_grammar(guided, self.vocabulary))

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

    def masks(self, groups: Many[tuple[Sequence, ...]]) -> Masks:
        """What grammars allow in a step's logits [R, V], R == len(groups): rows and their masks, for `apply_masks`.

        Sequences of one group are children that have drawn nothing yet: all are at the beginning of their grammar.
        """
        rows = [i for i, group in enumerate(groups) if group[0].request.id in self._matchers]
        return rows, np.array([self._row(groups[i][0]) for i in rows], np.int32)

    def _row(self, sequence: Sequence) -> NDArray[np.int32]:
        """What may follow a sequence; one that drafts were added to may be ahead of its matcher.

        After a draft that isn't allowed nothing is drawn that counts: what was allowed in its place must do as a mask.
        """
        matcher = self._matcher(sequence)
        ahead = matcher.accept_prefix(sequence.output_token_ids[matcher.num_taken :])
        row = matcher.row()
        matcher.rollback(ahead)
        return row

    def cut(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        """The drafts up to the first that the sequence's grammar forbids. Unknown ones (-1) stay: masks judge them."""
        if sequence.request.id not in self._matchers or -1 in drafts:
            return drafts
        matcher = self._matcher(sequence)
        allowed = matcher.accept_prefix(drafts)
        matcher.rollback(allowed)
        return drafts[:allowed]

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


def language_of(guided: Guided) -> Node:
    """The texts that are asked for, as a tree. Quick. Raises `RequestError` naming what is not supported, and where."""
    try:
        if isinstance(guided, GuidedChoice):
            return Alt(tuple(map(concat, guided.choices)))
        return parse_regex(guided.pattern) if isinstance(guided, GuidedRegex) else parse_schema(str(guided.schema))
    except PatternError as error:
        raise RequestError("guided", guided, str(error)) from error
    except RecursionError as error:
        raise RequestError("guided", guided, "is nested too deep") from error


def compile_grammar(guided: Guided, vocabulary: Vocabulary) -> Grammar:
    """A grammar ready to mask. Raises `RequestError` for one that is over budget or that no text can match.

    Takes a second at most for what is within the budget, most often some hundredths.
    """
    try:
        grammar = Grammar(build_automaton(language_of(guided)), vocabulary)
    except (TooLargeError, RecursionError) as error:
        raise RequestError("guided", guided, f"is too large for an automaton: {error}; ask for less") from error
    if grammar.is_empty:
        raise RequestError("guided", guided, "no text matches it that can be written with this model's tokens")
    return grammar

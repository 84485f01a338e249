"""What a request asks for, as a grammar. `language_of` is quick and finds what isn't supported; `compile_grammar` is not."""

from __future__ import annotations

from minivllm.config import RequestError
from minivllm.request import Guided, GuidedChoice, GuidedRegex
from minivllm.sample.grammar.automaton import TooLargeError, build_automaton
from minivllm.sample.grammar.mask import Grammar
from minivllm.sample.grammar.regex import PatternError, parse_regex
from minivllm.sample.grammar.schema import parse_schema
from minivllm.sample.grammar.syntax import Alt, Node, literal
from minivllm.sample.grammar.vocabulary import Vocabulary


def language_of(guided: Guided) -> Node:
    """The texts that are asked for. Raises `RequestError` naming what is not supported, and where it stands."""
    if isinstance(guided, GuidedChoice):
        return Alt(tuple(map(literal, guided.choices)))
    if isinstance(guided, GuidedRegex):
        try:
            return parse_regex(guided.pattern)
        except PatternError as error:
            raise RequestError("guided", guided.pattern, str(error)) from error
    return parse_schema(str(guided.schema))


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

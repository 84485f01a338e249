"""On small vocabularies with holes: rows against brute force, and texts that can always be finished."""

import re

from hypothesis import given
from hypothesis import strategies as st

from minivllm.sample.grammar.automaton import START, build_automaton
from minivllm.sample.grammar.mask import Grammar, Matcher
from minivllm.sample.grammar.regex import parse_regex
from tests.grammar_support import EOS, bits, can_accept, live_states, vocabularies, write_at_random
from tests.props.test_grammar_regex_props import patterns

BYTES = "ab1 é€".encode()


@given(patterns, vocabularies(BYTES), st.integers(0, 2**32), st.integers(0, 6))
def test_a_bit_is_set_exactly_if_the_text_can_be_finished_after_its_token(pattern, vocabulary, seed, num_tokens):
    automaton = build_automaton(parse_regex(pattern))
    grammar, live = Grammar(automaton, vocabulary), live_states(automaton, vocabulary)
    assert grammar.is_empty == (START not in live)
    if grammar.is_empty:
        return
    before = write_at_random(grammar, seed, num_tokens)
    if before.ended:
        return
    state = automaton.run(before.text)
    row = bits(grammar.row(state), vocabulary.size)
    for token in range(vocabulary.size):
        if token == EOS:
            expected = bool(automaton.accepting[state])
        else:
            text = vocabulary.texts.get(token, b"")
            expected = text != b"" and automaton.run(text, state) in live
        assert row[token] == expected, token


@given(patterns, vocabularies(BYTES), st.data())
def test_accept_agrees_with_the_row_and_rollback_restores_it(pattern, vocabulary, data):
    grammar = Grammar(build_automaton(parse_regex(pattern)), vocabulary)
    if grammar.is_empty:
        return
    matcher, rows = Matcher(grammar), []
    for _ in range(data.draw(st.integers(0, 5))):
        row = bits(matcher.row(), vocabulary.size)
        assert row == bits(matcher.row(), vocabulary.size), "reading a row changed it"
        assert any(row), "nothing left to say"
        assert matcher.ended or row == [can_accept(matcher, token) for token in range(vocabulary.size)]
        rows.append(row)
        matcher.accept(data.draw(st.sampled_from([i for i, bit in enumerate(row) if bit])))
    back = data.draw(st.integers(0, len(rows)))
    matcher.rollback(back)
    if back:
        assert bits(matcher.row(), vocabulary.size) == rows[len(rows) - back]


@given(patterns, vocabularies(BYTES), st.integers(0, 2**32))
def test_what_is_written_to_its_end_matches(pattern, vocabulary, seed):
    grammar = Grammar(build_automaton(parse_regex(pattern)), vocabulary)
    if grammar.is_empty:
        return
    written = write_at_random(grammar, seed, 30)
    if written.ended:
        assert re.fullmatch(pattern, written.text.decode(), re.ASCII)

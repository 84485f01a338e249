"""Generated patterns against Python's `re`, on texts out of the same few characters."""

import re

from hypothesis import given
from hypothesis import strategies as st

from minivllm.sample.grammar.automaton import build_automaton
from minivllm.sample.grammar.regex import parse_regex

LETTERS = "ab1 é€"
atoms = st.sampled_from([*LETTERS, ".", r"\d", r"\W", r"\s", "[ab]", "[^a]", "[a-é]", r"[^\d€]"])


def extend(patterns: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(patterns, min_size=2, max_size=3).map("".join),
        st.lists(patterns, min_size=2, max_size=3).map(lambda options: f"({'|'.join(options)})"),
        st.tuples(patterns, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    )


patterns = st.recursive(atoms, extend, max_leaves=6)


@given(patterns, st.lists(st.text(LETTERS, max_size=6), min_size=5, max_size=5))
def test_an_automaton_matches_what_re_matches(pattern: str, texts: list[str]):
    automaton = build_automaton(parse_regex(pattern))
    for text in texts:
        assert automaton.matches(text.encode()) == bool(re.fullmatch(pattern, text, re.ASCII)), text


@given(patterns, st.text(LETTERS, max_size=4), st.sampled_from([("", ""), ("^", ""), ("", "$"), ("^", "$")]))
def test_a_search_finds_what_re_finds_with_and_without_unicode(pattern: str, text: str, anchors: tuple[str, str]):
    whole = f"{anchors[0]}(?:{pattern}){anchors[1]}"
    found = build_automaton(parse_regex(whole, search=True)).matches(text.encode())
    by_all = all(re.search(whole, text, flags) for flags in (re.ASCII, re.UNICODE))
    assert found == by_all or (by_all and not text.isascii() and r"\W" in pattern)

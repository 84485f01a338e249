"""Patterns become automata that match what Python's `re` matches whole; what is no regular language is refused by name."""

import re

import pytest

from minivllm.sample.grammar.automaton import MAX_STATES, TooLargeError, build_automaton, byte_classes, utf8_paths
from minivllm.sample.grammar.regex import PatternError, parse_regex
from minivllm.sample.grammar.syntax import UNICODE, complement, intersection

TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "abc",
    "aab",
    "foobar",
    "é",
    "aé",
    "12",
    "1_x",
    "a-b",
    "]",
    "\n",
    "a\n",
    " ",
    "€",
    "😀",
    "{1}",
]


@pytest.mark.parametrize(
    "pattern",
    ["", "a|b", "a*b?", "(ab|c)+", "(?:a|b){2,3}", "[^a]", "[a-c]{1,}", "[a\\]]", ".", ".*", r"\d+", r"\w\W\w",
     r"\s", r"\S", r"[\d_x]+", r"[^\w]", "[a-]", "[-a]", r"\x61\u00e9", r"\n", r"\{1\}", "^a$", "^a|b$", "]", "(|a)b", "a{0}",
     "€|😀", "[é-😀]", r"[\n\]]", "(foo|ba[rz])*"],
)  # fmt: skip
def test_a_pattern_matches_what_re_matches_whole(pattern: str):
    automaton = build_automaton(parse_regex(pattern))
    for text in TEXTS:
        assert automaton.matches(text.encode()) == bool(re.fullmatch(pattern, text, re.ASCII)), text


@pytest.mark.parametrize("pattern", ["b", "^a", "b$", "^ab$", "^a|c$", ""])
def test_a_search_finds_the_pattern_anywhere_unless_it_is_anchored(pattern: str):
    automaton = build_automaton(parse_regex(pattern, search=True))
    for text in ["", "a", "b", "ab", "abc", "cab", "c"]:
        assert automaton.matches(text.encode()) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "construct"),
    [
        ("(?=a)", "look-around"), ("(?<n>a)", "look-around, name"), ("(?i)a", "flag"), (r"(a)\1", r"\\1"), (r"\bword", r"\\b"),
        (r"\p{L}", r"\\p"), ("a*?", "lazy"), ("a++", "possessive"), ("a{2}{3}", "repeat of a repeat"), ("a^b", "anchor here"),
        ("a$b", r"'\$'"), ("(a$)", "anchor within a group"), ("(a", r"'\(' without"), ("a)", r"'\)' without"), ("[a", "breaks off"),
        ("[]", "empty class"), ("[z-a]", "range"), (r"[\d-x]", "range"), ("*a", "repeats nothing"), ("{2}", "repeats nothing"),
        ("a{x}", "'{' that repeats nothing"), ("a{9999999}", "repeats nothing"), ("a{3,2}", "ends before"), ("\\", "breaks off"), (r"\u12", r"\\u"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named_with_its_place(pattern: str, construct: str):
    with pytest.raises(PatternError, match=rf"{construct}.*not supported \(position \d+\)"):
        parse_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "budget"),
    [
        ("((a?){1000}){1000}", "states and edges"), ("(){999999}", "states and edges"),
        ("(a|b)*a(a|b){30}", "over 20,000 states"), ("(.*a.{1000})*", "over"), ("((a?){40}b?){900}", "steps|states"),
    ],
)  # fmt: skip
def test_patterns_that_explode_are_refused(pattern: str, budget: str):
    with pytest.raises(TooLargeError, match=budget):
        build_automaton(parse_regex(pattern))


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(a?){300}a{300}", "((a*)*)*b", "(a|aa)+$"])
def test_patterns_on_which_backtracking_explodes_are_built(pattern: str):
    assert len(build_automaton(parse_regex(pattern)).table) < MAX_STATES


def test_complement_and_intersection_are_those_of_sets():
    few = ((97, 99), (200, 300))
    assert complement(few) == ((0, 96), (100, 199), (301, 0xD7FF), (0xE000, 0x10FFFF))
    assert complement(complement(few)) == few
    assert intersection(few, ((98, 250),)) == ((98, 99), (200, 250))
    assert complement(UNICODE) == ()


@pytest.mark.parametrize("ranges", [((0x61, 0x61),), ((0x7F, 0x801),), ((0xE123, 0x10345),), ((0x3FFFF, 0x10FFFF),)])
def test_utf8_paths_spell_exactly_the_characters_of_the_ranges(ranges):
    count = 0
    for path in utf8_paths(ranges):
        size = 1
        for low, high in path:
            size *= high - low + 1
        count += size
        for end in (0, 1):
            character = bytes(pair[end] for pair in path).decode()
            assert ranges[0][0] <= ord(character) <= ranges[0][1]
    assert count == ranges[0][1] - ranges[0][0] + 1


def test_bytes_that_no_range_tells_apart_share_a_class():
    class_of = byte_classes([(97, 122), (101, 101)])
    assert (class_of[0], class_of[-1]) == (0, 4)
    assert class_of[97] == class_of[100] != class_of[101] != class_of[102]
    assert class_of[0] == class_of[96] != class_of[123] == class_of[255]

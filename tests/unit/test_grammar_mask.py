"""Rows of allowed tokens, applied to logits, and a matcher that goes forward and back."""

import numpy as np
import pytest
import torch

from minivllm.sample.grammar.automaton import START, build_automaton
from minivllm.sample.grammar.mask import Grammar, GrammarError, Matcher, apply_masks
from minivllm.sample.grammar.regex import parse_regex
from tests.grammar_support import EOS, bits, make_vocabulary


def grammar(pattern: str, texts: list[bytes], size: int | None = None, **more: object) -> Grammar:
    return Grammar(build_automaton(parse_regex(pattern)), make_vocabulary(texts, size, **more))


def allowed(matcher: Matcher, size: int) -> set[int]:
    return {i for i, bit in enumerate(bits(matcher.row(), size)) if bit}


def test_the_trie_shares_beginnings_and_numbers_children_in_a_row():
    trie = make_vocabulary([b"ab", b"a", b"abc", b"b", b"ab"])
    assert len(trie.parent) == 5  # root, a, b, ab, abc
    assert trie.token_nodes.tolist() == [3, 1, 4, 2, 3]
    assert trie.children(np.array([0])).tolist() == [1, 2]
    assert trie.children(np.array([1, 2, 3])).tolist() == [3, 4]
    assert sorted(trie.single_bytes.tolist()) == [97, 98]


def test_a_token_is_allowed_if_all_its_bytes_can_follow():
    matcher = Matcher(grammar("ab|cd", [b"a", b"ab", b"abx", b"c", b"b", b"d", b""]))
    assert allowed(matcher, 8) == {1, 2, 4}
    matcher.accept(1)
    assert allowed(matcher, 8) == {5}


def test_the_end_is_allowed_exactly_where_the_text_is_complete():
    matcher = Matcher(grammar("ab?", [b"a", b"b"]))
    assert allowed(matcher, 3) == {1}
    matcher.accept(1)
    assert allowed(matcher, 3) == {2, EOS}
    matcher.accept(2)
    assert allowed(matcher, 3) == {EOS}


def test_every_token_that_ends_a_text_is_allowed_at_the_end():
    matcher = Matcher(grammar("a", [b"a", b"<end>"], eos=(EOS, 2)))
    assert allowed(matcher, 3) == {1}
    matcher.accept(1)
    assert allowed(matcher, 3) == {EOS, 2}


def test_a_token_that_no_token_could_follow_is_forbidden():
    with_b = grammar("ab|c", [b"a", b"b", b"c"])
    without_b = grammar("ab|c", [b"a", b"c"])
    assert allowed(Matcher(with_b), 4) == {1, 3}
    assert allowed(Matcher(without_b), 3) == {2}


def test_a_byte_without_a_token_is_reached_inside_a_longer_one():
    matcher = Matcher(grammar("a*(bc)?d", [b"a", b"bc", b"ab", b"d"]))
    assert allowed(matcher, 5) == {1, 2, 4}  # after "ab" only "c" could follow, which is no token
    alone = grammar("(bc){2}", [b"bcb", b"c"])
    assert allowed(Matcher(alone), 3) == {1}
    assert not alone.is_empty


def test_a_language_that_no_tokens_spell_is_empty():
    assert grammar("ab", [b"a"]).is_empty
    assert grammar("[^\\x00-\U0010ffff]", [b"a"]).is_empty
    assert not grammar("", []).is_empty


@pytest.mark.parametrize("size", [3, 32, 33, 64, 100])
def test_a_row_has_a_word_for_each_32_tokens_and_no_bits_beyond_them(size: int):
    row = grammar("a", [b"a", b"b"], size).row(START)
    assert (row.dtype, len(row)) == (np.int32, -(-size // 32))
    assert bits(row, len(row) * 32) == [i == 1 for i in range(len(row) * 32)]


def test_the_sign_bit_is_token_31():
    texts = [b"x"] * 30 + [b"a"]
    assert grammar("a", texts).row(START).tolist() == [-(2**31)]


def test_masks_reach_their_rows_and_no_others():
    logits = torch.zeros(3, 35)
    masks = np.array([[1 << 5, 1], [-1, -1]], dtype=np.int32)
    apply_masks(logits, [2, 0], masks)
    assert (logits[2] == 0).nonzero().flatten().tolist() == [5, 32]
    assert bool((logits[:2] == 0).all())
    assert bool((logits[2][logits[2] != 0] == -torch.inf).all())


def test_an_ended_matcher_allows_everything_and_stays_ended():
    matcher = Matcher(grammar("a", [b"a", b"b"]))
    for token in (1, EOS, 2, EOS):
        matcher.accept(token)
    assert matcher.ended
    assert matcher.row().tolist() == [-1]
    matcher.rollback(3)
    assert not matcher.ended
    assert allowed(matcher, 3) == {EOS}


@pytest.mark.parametrize("token", [EOS, 2, 3, 77, -1])
def test_a_forbidden_token_raises_and_changes_nothing(token: int):
    matcher = Matcher(grammar("ac", [b"a", b"b", b"", b"c"]))
    with pytest.raises(GrammarError, match=f"token {token} "):
        matcher.accept(token)
    assert allowed(matcher, 5) == {1}


def test_no_more_is_taken_back_than_was_taken():
    matcher = Matcher(grammar("a", [b"a"]))
    matcher.accept(1)
    for number in (2, -1):
        with pytest.raises(ValueError, match=f"num_tokens={number}: 1 were taken"):
            matcher.rollback(number)


def test_rows_of_old_states_are_dropped_and_computed_again(monkeypatch):
    monkeypatch.setattr("minivllm.sample.grammar.mask.MAX_ROWS", 2)
    some = grammar("abcd", [b"a", b"b", b"c", b"d"])
    rows = [some.row(state).tolist() for state in (1, 2, 3, 4)]
    assert [some.row(state).tolist() for state in (1, 2, 3, 4)] == rows

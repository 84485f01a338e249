"""Stop strings in streamed text: worked examples."""

import pytest

from minivllm.sample.stop import StopChecker


def feed_all(checker, *pieces):
    return [checker.feed(piece) for piece in pieces]


def test_text_before_the_stop_string_is_shown_and_nothing_after():
    assert StopChecker(("STOP",)).feed("go STOP now") == ("go ", "STOP")


def test_the_stop_string_itself_is_shown_on_request():
    assert StopChecker(("STOP",), include=True).feed("go STOP now") == ("go STOP", "STOP")


def test_a_stop_string_over_three_pieces_is_never_shown():
    assert feed_all(StopChecker(("STOP",)), "go S", "TO", "P now") == [("go ", None), ("", None), ("", "STOP")]


def test_held_text_that_turns_out_harmless_is_shown():
    assert feed_all(StopChecker(("STOP",)), "go S", "o") == [("go ", None), ("So", None)]


def test_only_the_longest_end_that_may_grow_into_a_match_is_held():
    checker = StopChecker(("aab",))
    assert checker.feed("aaa") == ("a", None)
    assert checker.held == "aa"


def test_nothing_is_held_when_the_stop_string_will_be_shown_anyway():
    checker = StopChecker(("STOP",), include=True)
    assert feed_all(checker, "go ST", "OP now") == [("go ST", None), ("OP", "STOP")]
    assert checker.held == ""


def test_the_final_piece_shows_what_was_held():
    checker = StopChecker(("STOP",))
    checker.feed("go ST")
    assert checker.feed("", final=True) == ("ST", None)
    assert checker.held == ""


def test_a_match_in_the_final_piece_counts():
    assert StopChecker(("b",)).feed("ab", final=True) == ("a", "b")


def test_the_match_that_completes_first_wins_though_another_began_before():
    assert StopChecker(("abcd", "bc")).feed("abcd") == ("a", "bc")


@pytest.mark.parametrize(("stop", "shown"), [(("b", "ab"), "xa"), (("ab", "b"), "x")])
def test_of_matches_that_complete_together_the_first_in_the_list_wins(stop, shown):
    assert StopChecker(stop).feed("xab") == (shown, stop[0])


def test_pieces_after_a_match_are_dropped():
    assert feed_all(StopChecker(("b",)), "ab", "cb") == [("a", "b"), ("", "b")]


def test_a_match_completed_before_min_tokens_does_not_count():
    checker = StopChecker(("no",))
    assert checker.feed("say no", active=False) == ("say no", None)
    assert checker.feed(" yes") == (" yes", None)


def test_a_match_begun_before_min_tokens_and_completed_after_counts():
    checker = StopChecker(("no",))
    assert checker.feed("say n", active=False) == ("say ", None)
    assert checker.feed("o") == ("", "no")


def test_a_match_completed_before_min_tokens_may_still_begin_a_longer_one():
    checker = StopChecker(("ab", "abc"))
    assert checker.feed("ab", active=False) == ("", None)
    assert checker.feed("c") == ("", "abc")


def test_without_stop_strings_everything_is_shown_at_once():
    assert StopChecker(()).feed("anything") == ("anything", None)

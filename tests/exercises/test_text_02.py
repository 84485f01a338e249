"""text-02: a stop string ends the text however it is cut, and no more is held back than must be."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minivllm.sample.stop import StopChecker


def part(name: str) -> pytest.MarkDecorator:
    return pytest.mark.part("text-02", name)


def feed(pieces, *stop: str, include: bool = False, finish: bool = True) -> tuple[list[str], str | None]:
    """(what is shown for each piece, the match) of text that ends with the last piece if `finish`."""
    checker = StopChecker(tuple(stop), include)
    shown, match = [], None
    for i, piece in enumerate(pieces, 1):
        text, match = checker.feed(piece, final=finish and i == len(pieces))
        shown.append(text)
    return shown, match


@part("a stop string ends the text, wherever the pieces are cut")
class TestMatch:
    def test_within_a_piece(self):
        assert feed(["one END two"], "END") == (["one "], "END"), "the text ends before the stop string"

    @pytest.mark.parametrize("pieces", [["x EN", "D"], ["x E", "N", "D"], ["x ", "E", "N", "D y"], [*"x END"]])
    def test_across_pieces(self, pieces):
        shown, match = feed(pieces, "END")
        assert ("".join(shown), match) == ("x ", "END"), (
            "a stop string cut into pieces must be found, and none of it shown"
        )

    def test_a_false_start_is_shown(self):
        shown, match = feed(["x EN", "T", " END"], "END")
        assert ("".join(shown), match) == ("x ENT ", "END"), "what only looked like a stop string is text"

    def test_a_start_within_a_start(self):
        shown, match = feed([*"aaab"], "aab")
        assert ("".join(shown), match) == ("a", "aab"), "the stop string begins at the second character"

    def test_at_the_end_nothing_is_lost(self):
        shown, match = feed(["x ", "EN"], "END")
        assert ("".join(shown), match) == ("x EN", None), "the last piece shows what was held back"

    def test_after_a_match_nothing_comes(self):
        checker = StopChecker(("END",))
        checker.feed("a END b")
        assert checker.feed("more", final=True) == ("", "END"), "pieces after a match are dropped; the answer stays"

    def test_without_stop_strings_all_is_shown_at_once(self):
        assert feed(["a", "b"], finish=False) == (["a", "b"], None), "without stop strings nothing is held back"


@part("of several stop strings the one that completes first wins")
class TestSeveral:
    def test_completing_first_beats_beginning_first(self):
        shown, match = feed(["abcde"], "abcd", "bc")
        assert ("".join(shown), match) == ("a", "bc"), "'bc' is complete before 'abcd' is, though it begins later"

    def test_the_same_with_one_character_at_a_time(self):
        shown, match = feed([*"abcde"], "abcd", "bc")
        assert ("".join(shown), match) == ("a", "bc"), "cutting the text must not change the match"

    @pytest.mark.parametrize(("stop", "left"), [(("abc", "c"), ""), (("c", "abc"), "ab")])
    def test_a_tie_goes_to_the_first_in_the_list(self, stop, left):
        shown, match = feed(["abc"], *stop)
        assert ("".join(shown), match) == (left, stop[0]), "at the same character the first in `stop` wins"

    def test_the_first_occurrence_counts(self):
        assert feed(["a.b!c"], "!", ".") == (["a"], "."), "the order in `stop` decides ties only"


@part("only what may become a stop string is held back")
class TestHeld:
    def test_ordinary_text_flows(self):
        assert feed(["hello ", "world"], "STOP", finish=False) == (["hello ", "world"], None), (
            "no S, T, O, P here: no wait"
        )

    def test_the_longest_beginning_waits(self):
        checker = StopChecker(("abac",))
        assert checker.feed("xaba") == ("x", None), "'aba' may become 'abac': hold all of it"
        assert checker.held == "aba", "held is the text that was fed and not shown"
        assert checker.feed("b") == ("ab", None), "after 'abab' only the last 'ab' can still become 'abac'"
        assert checker.held == "ab", "held is the text that was fed and not shown"

    def test_a_long_stop_string_cut_into_many_pieces(self):
        shown, match = feed([*"see <|user|>"], "<|user|>", finish=False)
        assert (shown[:4], "".join(shown), match) == ([*"see "], "see ", "<|user|>"), "text flows until the '<' comes"

    def test_the_last_piece_leaves_nothing(self):
        checker = StopChecker(("END",))
        checker.feed("E", final=True)
        assert checker.held == "", "after the final piece nothing is held"


@part("`include` and `active` do what they say")
class TestSwitches:
    def test_include_shows_the_stop_string(self):
        assert feed(["a END b"], "END", include=True) == (["a END"], "END"), (
            "with include the text ends after the stop string"
        )

    def test_include_holds_nothing_back(self):
        checker = StopChecker(("END",), include=True)
        shown = [checker.feed(piece)[0] for piece in ("x E", "N")]
        assert (shown, checker.held) == (["x E", "N"], ""), (
            "(shown, held): with include nothing waits, it will be shown in any case"
        )
        assert checker.feed("D y") == ("D", "END"), "found all the same"

    def test_an_inactive_piece_completes_no_match(self):
        checker = StopChecker(("END",))
        assert checker.feed("a END b", active=False) == ("a END b", None), "before min_tokens a stop string is text"
        assert checker.feed(" END") == (" ", "END"), "later ones count"

    def test_a_match_may_begin_in_an_inactive_piece(self):
        checker = StopChecker(("END",))
        assert checker.feed("x EN", active=False) == ("x ", None), "what may become a stop string is held all the same"
        assert checker.feed("D") == ("", "END"), "it is the last character that must be active"


def by_character(pieces: list[tuple[str, bool]], stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """(text shown in all, match), found by looking at all stop strings after each character."""
    text = ""
    for piece, active in pieces:
        for character in piece:
            text += character
            ended = [s for s in stop if active and text.endswith(s)]
            if ended:
                return (text if include else text[: len(text) - len(ended[0])]), ended[0]
    return text, None


def longest_growing(text: str, stop: tuple[str, ...]) -> str:
    """The longest end of the text that a stop string begins with and goes on after."""
    ends = [text[i:] for i in range(len(text))]
    return next((end for end in ends if any(s.startswith(end) and s != end for s in stop)), "")


words = st.text("ab", min_size=1, max_size=3)
inputs = st.lists(st.tuples(st.text("abc", max_size=5), st.sampled_from([True, True, False])), min_size=1, max_size=6)


@part("for any text, stops and cuts the answer is that of a search character by character")
class TestAny:
    @example([("ab", True)], ("b", "ab"), False)
    @given(inputs, st.lists(words, max_size=3).map(tuple), st.booleans())
    def test_the_same_text_and_match(self, pieces, stop, include):
        checker = StopChecker(stop, include)
        shown, match = "", None
        for i, (piece, active) in enumerate(pieces, 1):
            text, match = checker.feed(piece, final=i == len(pieces), active=active)
            shown += text
        assert (shown, match) == by_character(pieces, stop, include), (
            "(shown in all, match): another text, or another match"
        )

    @given(inputs, st.lists(words, min_size=1, max_size=3).map(tuple))
    def test_shown_and_held_are_the_text(self, pieces, stop):
        checker, shown, fed = StopChecker(stop), "", ""
        for piece, active in pieces:
            text, match = checker.feed(piece, active=active)
            shown, fed = shown + text, fed + piece
            if match is not None:
                return
            assert shown + checker.held == fed, "what was shown and what is held make up the text"
            assert checker.held == longest_growing(fed, stop), (
                "held is not the longest end that may become a stop string"
            )

"""The stop checker against a scan of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from minivllm.sample.stop import StopChecker

stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)
pieces_of_text = st.lists(st.text("abc", max_size=4), max_size=12)


def first_match(stop, text, after=0):
    """(start, end, string) of the match that completes first after `after` characters: the definition, by brute force."""
    for end in range(after + 1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                return end - len(string), end, string
    return None


def run(checker, pieces, inactive=0):
    """Feed the pieces, then a final empty one: what was shown in all, the match and the piece in which it came."""
    shown, where = "", None
    for i, piece in enumerate([*pieces, ""]):
        text, match = checker.feed(piece, final=i == len(pieces), active=i >= inactive)
        shown += text
        if match is not None and where is None:
            where = i
    return shown, checker.matched, where


@given(stops, pieces_of_text, st.booleans(), st.integers(0, 5))
def test_shows_what_a_scan_of_the_whole_text_says(stop, pieces, include, inactive):
    text, before = "".join(pieces), "".join(pieces[:inactive])
    shown, matched, _ = run(StopChecker(stop, include), pieces, inactive)
    match = first_match(stop, text, len(before))
    if match is None:
        assert (shown, matched) == (text, None)
    else:
        start, end, string = match
        assert (shown, matched) == (text[: end if include else start], string)


@given(stops, pieces_of_text, st.booleans())
def test_the_match_comes_with_the_piece_that_completes_it(stop, pieces, include):
    _, matched, where = run(StopChecker(stop, include), pieces)
    if matched is not None:
        _, end, _ = first_match(stop, "".join(pieces))
        assert len("".join(pieces[:where])) < end <= len("".join(pieces[: where + 1]))


@given(stops, pieces_of_text, st.booleans())
def test_pieces_make_no_difference(stop, pieces, include):
    whole = run(StopChecker(stop, include), ["".join(pieces)])
    characters = run(StopChecker(stop, include), list("".join(pieces)))
    assert run(StopChecker(stop, include), pieces)[:2] == whole[:2] == characters[:2]


@given(stops, pieces_of_text, st.booleans())
def test_shown_and_held_are_all_the_text_until_a_match(stop, pieces, include):
    checker, shown, fed = StopChecker(stop, include), "", ""
    for piece in pieces:
        text, match = checker.feed(piece)
        shown, fed = shown + text, fed + piece
        if match is not None:
            break
        assert shown + checker.held == fed


@given(stops, pieces_of_text, st.integers(0, 5))
def test_held_is_exactly_the_longest_end_that_may_become_a_match(stop, pieces, inactive):
    checker, fed = StopChecker(stop), ""
    for i, piece in enumerate(pieces):
        fed += piece
        if checker.feed(piece, active=i >= inactive)[1] is not None:
            break
        beginnings = {string[:n] for string in stop for n in range(len(string))}
        assert checker.held == max((b for b in beginnings if fed.endswith(b)), key=len, default="")


@given(stops, pieces_of_text, st.integers(0, 5))
def test_no_part_of_a_match_that_comes_later_was_shown(stop, pieces, inactive):
    checker, shown = StopChecker(stop), ""
    match = first_match(stop, "".join(pieces), len("".join(pieces[:inactive])))
    for i, piece in enumerate(pieces):
        shown += checker.feed(piece, active=i >= inactive)[0]
        assert match is None or len(shown) <= match[0]

"""What graders say: which behaviour was due, and what came instead of what."""

import pytest

from minivllm.course.expect import FITS, comparison, must_raise


class TestMustRaise:
    def test_the_right_exception_passes_with_any_message_or_none(self):
        with must_raise(ValueError, "freeing twice"):
            raise ValueError

    def test_none_is_said_in_words(self):
        due = "freeing twice must raise ValueError, but it went through"
        with pytest.raises(AssertionError, match=due), must_raise(ValueError, "freeing twice"):
            pass

    def test_another_one_goes_through_with_a_note(self):
        with pytest.raises(StopIteration) as caught, must_raise(ValueError, "freeing twice"):
            raise StopIteration
        assert caught.value.__notes__ == ["due: freeing twice must raise ValueError"]


class TestComparison:
    def test_what_is_short_is_shown_whole(self):
        ids = list(range(60))
        assert comparison(ids, ids[::-1]) == [f"came:     {ids}", f"expected: {ids[::-1]}"]

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_what_is_long_from_the_first_difference(self, kind):
        expected = list(range(1000))
        came = [*expected[:990], -1, *expected[991:]]
        assert comparison(kind(came), kind(expected)) == [
            "first difference at index 990",
            f"came:     {kind(came[990:])}",
            f"expected: {kind(expected[990:])}",
        ]

    def test_one_that_ends_early(self):
        came, expected = list(range(200)), list(range(202))
        assert comparison(came, expected) == ["first difference at index 200", "came:     []", "expected: [200, 201]"]

    def test_long_text(self):
        lines = comparison("a" * 400 + "b", "a" * 400 + "c")
        assert lines == ["first difference at index 400", "came:     'b'", "expected: 'c'"]

    def test_never_more_than_plain_pytest_shows(self):
        assert max(map(len, comparison({1: "a" * 5000}, {1: "b" * 5000}))) <= FITS + len("expected: ")

    def test_a_hash_by_its_first_bytes(self):
        assert comparison(b"\1" * 32, None) == ["came:     the hash 01010101...", "expected: None"]

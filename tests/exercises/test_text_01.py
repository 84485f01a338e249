"""text-01: the pieces that a detokenizer returns, joined, are the text decoded as a whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.course.expect import must_raise
from minivllm.sample.detok import IncrementalDetokenizer

BAD = "\N{REPLACEMENT CHARACTER}"


def part(name: str) -> pytest.MarkDecorator:
    return pytest.mark.part("text-01", name)


def stream(*tokens: bytes, skip: frozenset[int] = frozenset()) -> list[str]:
    """What comes for each token, token i being tokens[i], and in the end."""
    detokenizer = IncrementalDetokenizer(tokens.__getitem__, skip)
    return [*(detokenizer.push(i) for i in range(len(tokens))), detokenizer.finish()]


@part("text comes as soon as its bytes are complete")
class TestAtOnce:
    def test_whole_characters_wait_for_nothing(self):
        assert stream(b"Hel", b"lo", b", ", b"world") == ["Hel", "lo", ", ", "world", ""], (
            "nothing may be held back here"
        )

    def test_characters_of_several_bytes_in_one_token(self):
        assert stream("né ".encode(), "世界".encode(), "😀".encode()) == ["né ", "世界", "😀", ""], (
            "nothing to wait for here"
        )

    def test_what_comes_before_an_unfinished_character(self):
        assert stream(b"ab\xc3", b"\xa9") == ["ab", "é", ""], (
            "only the unfinished character waits, not the text before it"
        )

    def test_every_repetition_comes(self):
        assert stream(b"la ", b"la ", b"la ") == ["la ", "la ", "la ", ""], "text that was shown before comes again"


@part("a character cut into several tokens comes whole")
class TestCut:
    def test_two_tokens(self):
        assert stream(b"\xc3", b"\xa9") == ["", "é", ""], "half a character is no text yet, not even U+FFFD"

    @pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3)])
    def test_an_emoji_cut_anywhere(self, cuts):
        data, ends = "😀".encode(), [*cuts, 4]
        pieces = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        assert stream(*pieces) == [*[""] * (len(pieces) - 1), "😀", ""], "the character comes with its last byte"

    def test_one_token_ends_a_character_and_begins_the_next(self):
        got = stream(b"a", "é世".encode() + b"\xc3", b"\xa9\xc3", b"\xa9")
        assert got == ["a", "é世", "é", "é", ""], "no text may come twice or be lost where tokens overlap characters"

    def test_an_emoji_of_many_code_points(self):
        family = "👨‍👩‍👧"
        assert "".join(stream(*(bytes([b]) for b in family.encode()))) == family, "byte by byte is the same text"


@part("invalid bytes come as U+FFFD, and nothing is lost at the end")
class TestInvalid:
    def test_what_can_never_become_a_character(self):
        assert stream(b"a\xff", b"b") == [f"a{BAD}", "b", ""], "an invalid byte is U+FFFD, and needs no waiting"

    def test_a_character_that_is_given_up(self):
        assert stream(b"\xe4\xb8", b"x") == ["", f"{BAD}x", ""], "when the rest doesn't come, its U+FFFD does"

    def test_the_end_inside_a_character(self):
        assert stream(b"ok \xf0\x9f\x98") == ["ok ", BAD], "finish returns U+FFFD for what was left unfinished"

    def test_the_text_before_an_unfinished_end_is_not_lost(self):
        assert "".join(stream(b"a\xc3")) == f"a{BAD}", "nothing may be lost when the tokens end inside a character"

    def test_a_real_replacement_character_is_text(self):
        assert stream(BAD.encode(), b"!") == [BAD, "!", ""], "a U+FFFD that the model wrote is text like any other"

    def test_invalid_bytes_for_ever(self):
        got = stream(*[b"\x80"] * 100)
        assert max(map(len, got)) <= 4, "invalid bytes come as they are found, not all in the end"
        assert "".join(got) == BAD * 100, "each of them is one U+FFFD"

    def test_nothing_at_all(self):
        assert stream() == [""], "no tokens, no text"


@part("special tokens leave no trace")
class TestSkip:
    def test_their_bytes_are_no_text(self):
        got = stream(b"<s>", b"hi", b"</s>", skip=frozenset({0, 2}))
        assert got == ["", "hi", "", ""], "tokens in skip_ids count as no bytes at all"

    def test_a_character_goes_on_behind_them(self):
        assert stream(b"\xc3", b"</s>", b"\xa9", skip=frozenset({1})) == ["", "", "é", ""], "as if it were not there"

    def test_their_bytes_may_be_unknown(self):
        detokenizer = IncrementalDetokenizer({0: b"x"}.__getitem__, frozenset({7}))
        assert detokenizer.push(7) == "", "bytes of a skipped token must not be asked for: it may have none"
        with must_raise(KeyError, "pushing an id for which token_bytes raises KeyError"):
            detokenizer.push(8)


any_bytes = st.lists(
    st.sampled_from([b"a", b"\xc3", b"\xa9", b"\xe4\xb8", b"\x96", b"\xf0", b"\x9f\x98", b"\x80", b"\xff"])
)
some_text = st.text().map(lambda text: [bytes([b]) for b in text.encode()])


@part("whatever the bytes and the cuts, the pieces joined are the text decoded as a whole")
class TestAny:
    @given(any_bytes | some_text)
    def test_joined_it_is_the_whole(self, tokens):
        assert "".join(stream(*tokens)) == b"".join(tokens).decode(errors="replace"), (
            "the joined pieces are another text"
        )

    @given(any_bytes)
    def test_what_came_is_always_a_beginning_of_it(self, tokens):
        full = b"".join(tokens).decode(errors="replace")
        pieces = stream(*tokens)
        for n in range(len(pieces)):
            came = "".join(pieces[:n])
            assert full.startswith(came), f"after {n} tokens {came!r} had come, but the whole text is {full!r}"

    @given(some_text)
    def test_at_most_three_bytes_wait(self, tokens):
        pieces = stream(*tokens)
        for n in range(1, len(tokens) + 1):
            waiting = n - len("".join(pieces[:n]).encode())
            assert waiting <= 3, f"{waiting} bytes are held back; an unfinished character has 3 at most"

    @given(st.text(), st.randoms(use_true_random=False))
    def test_cuts_make_no_difference(self, text, random):
        data, pieces = text.encode(), []
        while data:
            n = random.randint(1, 5)
            pieces.append(data[:n])
            data = data[n:]
        assert "".join(stream(*pieces)) == text, "the cuts into tokens changed the text"

"""Streaming detokenisation by bytes and by offsets: worked examples."""

import pytest

from minivllm.config import ConfigError
from minivllm.course.offset_detok import OffsetDetokenizer
from minivllm.sample.detok import IncrementalDetokenizer

SPLIT_CHARACTERS = [b"a", "é世".encode() + b"\xc3", b"\xa9\xc3", b"\xa9"]


def by_bytes(vocab, **options):
    return IncrementalDetokenizer(lambda token: vocab[token], **options)


def by_offsets(vocab, **options):
    return OffsetDetokenizer(lambda ids: b"".join(vocab[i] for i in ids).decode(errors="replace"), **options)


def stream(detokenizer, token_ids):
    return [detokenizer.push(token) for token in token_ids], detokenizer.finish()


def test_bytes_show_every_character_with_the_token_that_completes_it():
    assert stream(by_bytes(SPLIT_CHARACTERS), range(4)) == (["a", "é世", "é", "é"], "")


def test_offsets_wait_for_a_token_that_ends_on_a_character():
    assert stream(by_offsets(SPLIT_CHARACTERS), range(4)) == (["a", "", "", "é世éé"], "")


@pytest.mark.parametrize("build", [by_bytes, by_offsets])
def test_an_emoji_in_four_tokens_comes_whole(build):
    vocab = [bytes([byte]) for byte in "😀".encode()]
    assert stream(build(vocab), range(4)) == (["", "", "", "😀"], "")


@pytest.mark.parametrize(("build", "shown"), [(by_bytes, "a"), (by_offsets, "")])
def test_a_last_token_that_ends_inside_a_character_is_flushed(build, shown):
    assert stream(build([b"a\xc3"]), [0]) == ([shown], "a\ufffd"[len(shown) :])


@pytest.mark.parametrize("build", [by_bytes, by_offsets])
def test_a_replacement_character_that_the_model_wrote_is_shown(build):
    vocab = ["\ufffd".encode(), b"!"]
    shown, rest = stream(build(vocab), [0, 1])
    assert "".join(shown) + rest == "\ufffd!"


@pytest.mark.parametrize("build", [by_bytes, by_offsets])
def test_skipped_tokens_leave_no_trace_even_inside_a_character(build):
    vocab = [b"\xc3", b"<eos>", b"\xa9"]
    assert stream(build(vocab, skip_ids=frozenset({1})), [0, 1, 2]) == (["", "", "é"], "")


@pytest.mark.parametrize("build", [by_bytes, by_offsets])
def test_empty_tokens_do_not_push_an_unfinished_character_out_of_the_window(build):
    vocab = [b"\xff", "世".encode()[:1], b"", "世".encode()[1:]]
    shown, rest = stream(build(vocab), [0, 1, *[2] * 20, 3])
    assert "".join(shown) + rest == "\ufffd世"


def test_a_new_detokenizer_has_nothing_to_finish():
    assert by_bytes([]).finish() == by_offsets([]).finish() == ""


@pytest.mark.parametrize(
    "vocab", [[b"\xff"], ["世".encode()[1:] + "世".encode()[:1]]], ids=["invalid for ever", "always inside a character"]
)
def test_offsets_do_not_wait_for_a_clean_end_that_never_comes(vocab):
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return b"".join(vocab[i] for i in ids).decode(errors="replace")

    detokenizer = OffsetDetokenizer(decode, window=6)
    shown = "".join(detokenizer.push(0) for _ in range(500))
    full = (vocab[0] * 500).decode(errors="replace")
    assert shown + detokenizer.finish() == full
    assert len(full) - len(shown) <= 2 * 7
    assert max(lengths) <= 2 * 6 + 2


def sentencepiece_decode(ids):
    """Words whose space is in front of them; the one in front of the text is dropped."""
    return "".join([" the", " cat", "s", " sat"][i] for i in ids).removeprefix(" ")


def test_offsets_keep_spaces_that_a_tokenizer_drops_at_the_start():
    assert stream(OffsetDetokenizer(sentencepiece_decode), [0, 1, 2, 3]) == (["the", " cat", "s", " sat"], "")


def test_offsets_keep_the_first_space_after_a_context():
    assert stream(OffsetDetokenizer(sentencepiece_decode, context=[0] * 20), [1, 2]) == ([" cat", "s"], "")


def byte_fallback_decode(ids):
    """As Llama 2's: a run of byte tokens is a text if it is valid as a whole, else U+FFFD for each byte."""
    data = bytes("é😀".encode()[i] for i in ids)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(data)


def test_offsets_wait_out_a_character_that_decodes_to_several_replacements():
    detokenizer = OffsetDetokenizer(byte_fallback_decode, window=4)
    assert stream(detokenizer, range(6)) == (["", "é", "", "", "", "😀"], "")


def test_a_window_too_small_to_hold_a_character_is_refused():
    with pytest.raises(ConfigError, match="window=3"):
        by_offsets([], window=3)

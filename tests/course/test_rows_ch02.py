"""Chapter 2, row A19: text as it comes, on the default model's tokenizer and on any text."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessons.naive import naive_deltas
from minivllm.config import EngineConfig
from minivllm.course.offset_detok import OffsetDetokenizer
from minivllm.llm import LLM
from minivllm.models.fetch import resolve_model
from minivllm.models.loader import open_checkpoint
from minivllm.request import SamplingParams
from minivllm.sample.detok import IncrementalDetokenizer
from minivllm.sample.stop import StopChecker

BAD = "\N{REPLACEMENT CHARACTER}"
COUNTING = "Count: one, two, three, four,"


@pytest.fixture(scope="module")
def tokenizer():
    return open_checkpoint(resolve_model(None)).tokenizer()


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "num_tokens", "broken"),
    [("😀", 3, 3), ("🙂", 2, 3), ("👍", 3, 3), ("👨‍👩‍👧", 13, 13), ("你好", 4, 4), ("é", 1, 0), (" 😀", 2, 2)],
)
def test_row_A19_tokens_and_replacement_characters_of_the_default_model(tokenizer, text, num_tokens, broken):
    ids = tokenizer.encode(text)
    assert len(ids) == num_tokens
    assert "".join(naive_deltas(tokenizer.decode, ids)).count(BAD) == broken


@pytest.mark.model
def test_row_A19_two_emoji_by_their_ids(tokenizer):
    assert tokenizer.encode("😀") == [10813, 242, 218]
    assert tokenizer.encode("🙂") == [10813, 38887]


def streams(tokenizer, ids):
    """Both detokenizers' pieces."""
    for detokenizer in (IncrementalDetokenizer(tokenizer.token_bytes), OffsetDetokenizer(tokenizer.decode)):
        yield [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.model
@given(st.text(max_size=30))
def test_row_A19_pieces_joined_are_one_decoding_of_everything(text):
    tokenizer = _tokenizer()
    ids = tokenizer.encode(text, parse_special=False)
    for pieces in streams(tokenizer, ids):
        assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.model
@given(st.text(max_size=30))
def test_row_A19_no_piece_holds_a_replacement_character_that_the_text_lacks(text):
    tokenizer = _tokenizer()
    ids = tokenizer.encode(text, parse_special=False)
    for pieces in streams(tokenizer, ids):
        assert "".join(pieces).count(BAD) <= tokenizer.decode(ids).count(BAD)


@pytest.mark.model
def test_row_A19_the_default_models_vocabulary_lacks_some_bytes(tokenizer):
    known = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    missing = {byte for byte in range(256) if bytes([byte]) not in known}
    assert 0xF1 in missing
    assert tokenizer.decode(tokenizer.encode("\U00040000")) == BAD * 3


def _tokenizer(cache=[]):  # noqa: B006 - hypothesis refuses function-scoped fixtures; opening it takes a second
    if not cache:
        cache.append(open_checkpoint(resolve_model(None)).tokenizer())
    return cache[0]


@given(st.binary(max_size=40), st.integers(1, 5))
def test_row_A19_never_more_than_three_bytes_wait(data, size):
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    detokenizer = IncrementalDetokenizer(pieces.__getitem__)
    shown = "".join(detokenizer.push(i) for i in range(len(pieces)))
    waiting = [keep for keep in range(4) if data[: len(data) - keep].decode(errors="replace") == shown]
    assert waiting


texts, stops = st.text("ab\n", max_size=20), st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def outcome(pieces, stop):
    checker, shown, match = StopChecker(tuple(stop)), [], None
    for i, piece in enumerate(pieces):
        text, match = checker.feed(piece, final=i == len(pieces) - 1)
        shown.append(text)
    return "".join(shown), match


@given(texts, stops, st.sets(st.integers(1, 19)))
def test_row_A19_cuts_make_no_difference_to_stop_strings(text, stop, cuts):
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert outcome(pieces, stop) == outcome([text], stop)


@given(texts, stops)
def test_row_A19_no_stop_string_is_ever_shown(text, stop):
    shown, match = outcome(list(text) or [""], stop)
    assert not any(string in shown for string in stop)
    assert match is not None or shown == text


def test_row_A19_what_completes_first_wins_over_what_begins_first():
    assert outcome(["xa", "bcd"], ["abcd", "bc"]) == ("xa", "bc")


@pytest.mark.model
def test_row_A19_the_engines_stream_ends_before_the_stop_string():
    llm = LLM(config=EngineConfig(dtype="float32", num_kv_blocks=64, max_model_len=512))

    async def deltas(stop):
        params = SamplingParams(temperature=0, max_tokens=20, stop=stop)
        return [output.outputs[0].delta async for output in llm.stream(COUNTING, params)]

    plain, stopped = asyncio.run(deltas(())), asyncio.run(deltas(("eight,",)))
    assert "".join(stopped) == "".join(plain).partition("eight,")[0]
    assert "eight," in "".join(plain)

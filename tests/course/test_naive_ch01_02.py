"""The naive baselines of chapters 1 and 2 break in the way that their chapters say, and where they are right they agree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lessons.naive import (
    naive_cached_generate,
    naive_deltas,
    naive_generate,
    naive_holdback,
    naive_offsets,
    naive_redecoded,
    naive_spill_tps,
    naive_stop,
)
from minivllm.calc.roofline import spill_tps
from minivllm.config import ModelConfig
from minivllm.models.decoder import Decoder
from minivllm.models.weights import weight_shapes
from minivllm.sample.detok import IncrementalDetokenizer
from minivllm.sample.stop import StopChecker

BAD = "\N{REPLACEMENT CHARACTER}"
SHAPE = ModelConfig("llama", 40, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)


@pytest.fixture(scope="module")
def decoder():
    draw = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64) * 0.5
        for name, shape in weight_shapes(SHAPE).items()
    }
    return Decoder(SHAPE, weights, dtype=torch.float64)


def decode(tokens):
    """A `decode(ids)` for tokens given as bytes."""
    return lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace")


# chapter 1


@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4, 5], [7] * 9])
def test_a_cache_changes_the_work_and_not_the_tokens(decoder, prompt):
    tokens, ran = naive_generate(decoder, prompt, 12)
    cached_tokens, cached_ran = naive_cached_generate(decoder, prompt, 12)
    assert cached_tokens == tokens
    assert ran == [len(prompt) + i for i in range(12)]
    assert cached_ran == [len(prompt)] + [1] * 11


def test_averaged_bandwidths_promise_more_than_the_clock_allows():
    assert naive_spill_tps(42.5e9, 22e9, 1008e9, 80e9) > 3 * spill_tps(42.5e9, 22e9, 1008e9, 80e9)


@given(st.floats(0, 1), st.floats(1e9, 1e12), st.floats(1e9, 1e12))
def test_averaged_bandwidths_are_never_below_the_truth(share, gpu, host):
    assert naive_spill_tps(1e9, share * 1e9, gpu, host) >= spill_tps(1e9, share * 1e9, gpu, host) * (1 - 1e-9)


# chapter 2


def test_a_token_by_itself_is_not_text():
    tokens = [b"\xc3", b"\xa9"]
    assert naive_deltas(decode(tokens), range(2)) == [BAD, BAD]


def test_decoding_everything_again_sends_what_is_not_certain():
    tokens = [b"a\xc3", b"\xa9b"]
    assert naive_redecoded(decode(tokens), range(2)) == ["a" + BAD, "b"]


def test_two_offsets_without_a_bound_wait_for_ever_and_work_more_and_more():
    deltas, work = naive_offsets(decode([b"\xff"] * 20), range(20))
    assert deltas == [""] * 20
    assert work == list(range(1, 21))


@given(st.text(max_size=15))
def test_two_offsets_are_right_where_every_character_gets_finished(text):
    tokens = [bytes([byte]) for byte in text.replace(BAD, "").encode()]
    deltas, _ = naive_offsets(decode(tokens), range(len(tokens)))
    detokenizer = IncrementalDetokenizer(tokens.__getitem__)
    assert deltas == [detokenizer.push(i) for i in range(len(tokens))]


def test_a_stop_string_in_two_pieces_is_missed_and_one_within_a_piece_is_found():
    assert naive_stop(["a EN", "D b"], "END") == ["a EN", "D b"]
    assert naive_stop(["a END b", "c"], "END") == ["a "]


@given(st.lists(st.text("ab", max_size=3), max_size=8), st.text("ab", min_size=1, max_size=4))
def test_who_holds_a_constant_length_back_never_holds_less_than_needed(pieces, stop):
    checker = StopChecker((stop,))
    for piece, held in zip(pieces, naive_holdback(pieces, [stop]), strict=True):
        _, match = checker.feed(piece)
        if match is not None:
            break
        assert len(checker.held) <= held

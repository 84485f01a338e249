"""Counter-based randomness: the published answers, and what keys and counters mean."""

import numpy as np
import pytest

from minivllm.sample.random import philox4x32, sequence_key, uniforms

# From Random123 (Salmon et al.), the file kat_vectors: counter, key, answer of philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def test_philox_gives_the_published_answers():
    counters, keys, answers = (np.array([words(row[i]) for row in KNOWN_ANSWERS], dtype=np.uint32) for i in range(3))
    assert philox4x32(counters, keys).tolist() == answers.tolist()


def test_a_uniform_is_made_of_the_first_two_words():
    expected = (0x6627E8D5E169C58D >> 11) / 2**53
    assert uniforms([0], [0]).tolist() == [expected]


def test_uniforms_are_in_the_unit_interval_and_spread_evenly():
    numbers = uniforms([3] * 10_000, range(10_000))
    assert 0 <= numbers.min() < numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # 9 degrees of freedom: exceeded by one key in a thousand


def test_a_uniform_depends_on_its_own_key_and_position_only():
    keys, positions = [5, 2**64 - 1, 2**32, 0], [0, 9, 2**33, 7]
    together = uniforms(keys, positions)
    assert [uniforms([k], [p])[0] for k, p in zip(keys, positions, strict=True)] == together.tolist()


def test_keys_positions_and_streams_over_32_bits_are_told_apart():
    numbers = {
        uniforms([key], [position], stream)[0]
        for key in (1, 1 + 2**32)
        for position in (1, 1 + 2**32)
        for stream in (0, 1)
    }
    assert len(numbers) == 8


def test_no_keys_give_no_numbers():
    assert uniforms([], []).shape == (0,)


def test_a_seeded_key_is_seed_plus_index_whatever_the_engine():
    assert sequence_key(7, 2, engine_seed=1, request_id="a") == sequence_key(9, 0, engine_seed=2, request_id="b") == 9


def test_an_unseeded_key_is_fixed_by_engine_seed_request_and_index():
    keys = {sequence_key(None, i, engine_seed, name) for i in (0, 1) for engine_seed in (0, 1) for name in "ab"}
    assert len(keys) == 8
    assert sequence_key(None, 1, 0, "a") in keys


@pytest.mark.parametrize("index", [0, 1, 1000])
def test_keys_fit_64_bits(index):
    assert 0 <= sequence_key(2**63 - 1, index, 0, "a") < 2**64
    assert 0 <= sequence_key(None, index, 0, "a") < 2**64

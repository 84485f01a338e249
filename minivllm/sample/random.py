"""Randomness without a state: a random number is a function of a key and a counter.

A generator that is advanced by each draw ties a request's tokens to whatever was drawn before: the batch, its order, a
preemption. A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) encrypts
the counter with the key instead, so any draw can be made at any time, in any order, again.
Here the key is the sequence (`sequence_key`) and the counter is the position of the token in its output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW_32 = np.uint64(0xFFFFFFFF)
SHIFT_32 = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32-10: four random 32-bit words for each counter [N, 4] under each key [N, 2]; returns uint32 [N, 4].

    A round multiplies words 0 and 2 by constants to 64 bits, and mixes each product's halves with the other words and
    the key; between rounds the key steps by two constants. Seven rounds pass the BigCrush tests, ten are the authors'
    advice. Source: Salmon et al., SC 2011; their Random123 library publishes known answers.
    """
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    k0, k1 = key.astype(np.uint64).T
    for _ in range(ROUNDS):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (right >> SHIFT_32) ^ c1 ^ k0, right & LOW_32
        c2, c3 = (left >> SHIFT_32) ^ c3 ^ k1, left & LOW_32
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW_32, (k1 + KEY_STEPS[1]) & LOW_32
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(keys: Many[int], positions: Many[int], stream: int = 0) -> NDArray[np.float64]:
    """One number in [0, 1) for each (64-bit key, output position); returns float64 [N], each a multiple of 2**-53.

    Element i depends on `keys[i]`, `positions[i]` and `stream` alone. Streams are independent: whoever needs a second
    number at a position (an acceptance test beside the draw itself, say) takes another stream.
    """
    words = philox4x32(_halves(positions, stream), _halves(keys)).astype(np.uint64)
    bits = (words[:, 0] << SHIFT_32 | words[:, 1]) >> np.uint64(11)  # a float64 holds 53 bits
    return bits.astype(np.float64) * 2.0**-53


def _halves(values: Many[int], *more: int) -> NDArray[np.uint32]:
    """64-bit values as rows of (low, high) 32-bit words, each followed by the words of `more`."""
    columns = [np.array(values, dtype=np.uint64), *(np.full(len(values), extra, dtype=np.uint64) for extra in more)]
    return np.stack([half for c in columns for half in (c & LOW_32, c >> SHIFT_32)], axis=1).astype(np.uint32)


def sequence_key(seed: int | None, index: int, engine_seed: int, request_id: str) -> int:
    """The 64-bit key with which child `index` of a request draws all its tokens.

    With a seed it is seed + index, the field's convention for n > 1: child 1 under seed 7 draws as child 0 under seed 8.
    Without one, the engine's seed and the request's id are hashed in its place, so a run can still be repeated.
    """
    if seed is None:
        digest = hashlib.blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    return (seed + index) % 2**64

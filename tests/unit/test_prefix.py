"""Prefix hashes: what enters them, how long a hit may be."""

from hashlib import sha256

import pytest

from minivllm.kv.block_pool import BlockPool
from minivllm.kv.prefix import ROOT_HASH, extend_hashes, hash_block, longest_hit


def hashes_of(tokens, size=16, salt=""):
    hashes = []
    extend_hashes(hashes, tokens, size, salt)
    return hashes


def pool_with(hashes):
    pool = BlockPool(len(hashes) + 2)
    for block, block_hash in zip(pool.allocate(len(hashes)), hashes, strict=True):
        pool.publish(block, block_hash)
    return pool


@pytest.mark.parametrize(
    ("prompt", "full", "hit", "recompute"),
    [(15, 0, 0, 15), (16, 1, 0, 16), (17, 1, 16, 1), (32, 2, 16, 16), (33, 2, 32, 1), (1000, 62, 992, 8)],
)
def test_full_blocks_longest_hit_and_what_is_left_to_compute(prompt, full, hit, recompute):
    tokens = list(range(prompt))
    hashes = hashes_of(tokens)
    found = longest_hit(hashes, prompt, 16, pool_with(hashes))
    assert len(hashes) == full
    assert len(found) * 16 == hit
    assert prompt - len(found) * 16 == recompute


def test_the_first_block_hangs_on_the_fixed_root():
    assert hashes_of([1, 2], 2) == [hash_block(ROOT_HASH, [1, 2])]


def test_a_hash_is_sha256_over_parent_salt_and_tokens_the_same_in_every_process():
    spelled_out = ROOT_HASH + b"\0\0\0\4salt" + b"".join(token.to_bytes(8, "little") for token in (1, 2, 3))
    assert hash_block(ROOT_HASH, [1, 2, 3], "salt") == sha256(spelled_out).digest()
    assert sha256(b"minivllm: parent of the first block").digest() == ROOT_HASH


def test_equal_blocks_behind_different_prefixes_differ():
    assert hashes_of([1, 2, 7, 8], 2)[1] != hashes_of([3, 4, 7, 8], 2)[1]


def test_a_salt_in_the_first_block_separates_all():
    plain, salted = hashes_of(range(8), 2), hashes_of(range(8), 2, "tenant")
    assert not set(plain) & set(salted)


def test_a_salt_may_be_any_string_that_json_can_bring():
    assert hashes_of([1], 1, "\ud800") != hashes_of([1], 1, "\ud801")


def test_changing_the_first_token_misses_everything():
    pool = pool_with(hashes_of(list(range(64))))
    assert longest_hit(hashes_of([9, *range(1, 64)]), 64, 16, pool) == []


def test_changing_the_last_token_of_block_k_keeps_k_blocks():
    pool = pool_with(hashes_of(list(range(80))))
    changed = list(range(80))
    changed[3 * 16 - 1] = 999
    assert len(longest_hit(hashes_of(changed), 80, 16, pool)) == 2


def test_a_hit_ends_at_the_first_miss():
    hashes = hashes_of(list(range(80)))
    assert len(longest_hit(hashes, 80, 16, pool_with([hashes[0], hashes[2]]))) == 1


def test_a_hit_takes_no_references():
    hashes = hashes_of(list(range(33)))
    pool = pool_with(hashes)
    before = [block.ref_count for block in pool.blocks]
    longest_hit(hashes, 33, 16, pool)
    assert [block.ref_count for block in pool.blocks] == before

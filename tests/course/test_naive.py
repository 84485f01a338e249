"""The lessons' naive baselines break in the way that their chapters say, and count rightly where they count."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lessons.naive import NaiveArena, NaivePromptCache, NaiveRandomPool, naive_hash_block, naive_stranded
from minivllm.kv.block_pool import BlockPool, OutOfBlocks
from minivllm.kv.prefix import ROOT_HASH, extend_hashes, hash_block

# chapter 3


def test_an_arena_takes_the_first_hole_and_joins_what_touches():
    arena = NaiveArena(10)
    a, b, c = arena.allocate(3), arena.allocate(4), arena.allocate(3)
    assert (a, b, c) == (0, 3, 7)
    arena.free(a, 3)
    arena.free(c, 3)
    assert arena.holes == [(0, 3), (7, 3)]
    arena.free(b, 4)
    assert arena.holes == [(0, 10)]


def test_an_arena_can_be_free_enough_and_still_refuse():
    arena = NaiveArena(9)
    ranges = [arena.allocate(3) for _ in range(3)]
    arena.free(ranges[0], 3)
    arena.free(ranges[2], 3)
    assert (arena.num_free, arena.largest_hole, arena.allocate(4)) == (6, 3, None)


@given(st.lists(st.integers(1, 6), max_size=30), st.randoms(use_true_random=False))
def test_ranges_of_an_arena_never_overlap_and_all_of_it_comes_back(lengths, rng):
    arena, held = NaiveArena(20), []
    for length in lengths:
        start = arena.allocate(length)
        if start is None and held:
            arena.free(*held.pop(rng.randrange(len(held))))
        elif start is not None:
            held.append((start, length))
        slots = [slot for start, size in held for slot in range(start, start + size)]
        assert len(slots) == len(set(slots)) == 20 - arena.num_free
    for start, length in held:
        arena.free(start, length)
    assert arena.holes == [(0, 20)]


# chapter 6


def published_chain(pool: BlockPool, tokens: list[int], block_size: int = 4) -> tuple[list, list[bytes]]:
    """Blocks that hold the tokens, published under their hashes, and the hashes."""
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size)
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    return blocks, hashes


def test_a_cache_of_whole_prompts_finds_only_whole_prompts():
    cache = NaivePromptCache()
    assert [cache.hit([1, 2, 3]), cache.hit([1, 2, 3]), cache.hit([1, 2, 3, 4])] == [0, 3, 0]


def test_a_hash_without_parent_confuses_prefixes_and_still_tells_blocks_and_salts_apart():
    other = hash_block(ROOT_HASH, [9, 9])
    assert naive_hash_block(ROOT_HASH, [1, 2]) == naive_hash_block(other, [1, 2])
    assert naive_hash_block(other, [1, 2]) != naive_hash_block(other, [2, 1])
    assert naive_hash_block(other, [1, 2], "a") != naive_hash_block(other, [1, 2], "b")


def test_a_random_victim_is_any_free_block_and_the_books_still_balance():
    victims = set()
    for seed in range(40):
        pool = NaiveRandomPool(6, seed)
        blocks, _ = published_chain(pool, list(range(12)))
        pool.free(blocks[::-1])
        (taken,) = pool.allocate(1)
        victims.add(taken.id)
        pool.integrity()
    assert victims == {1, 2, 3, 4, 5}


def test_a_random_pool_refuses_what_it_has_not():
    with pytest.raises((OutOfBlocks, ValueError)):
        NaiveRandomPool(4).allocate(4)


@pytest.mark.parametrize(("gone", "dead"), [(0, 2), (1, 1), (2, 0)])
def test_blocks_behind_a_gap_are_counted_as_stranded(gone, dead):
    pool = BlockPool(6)
    blocks, hashes = published_chain(pool, list(range(12)))
    pool.withdraw(blocks[gone])
    assert naive_stranded(pool, [hashes]) == dead


def test_a_second_copy_of_the_missing_block_makes_the_rest_reachable_again():
    pool = BlockPool(8)
    blocks, hashes = published_chain(pool, list(range(12)))
    pool.withdraw(blocks[0])
    pool.publish(pool.allocate(1)[0], hashes[0])
    assert naive_stranded(pool, [hashes]) == 0

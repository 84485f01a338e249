"""Prefix caching against its definitions: token tuples for hashes, a reference LRU for eviction, reachability for both."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minivllm.kv.prefix import ROOT_HASH, extend_hashes, hash_block, longest_hit
from tests.walks import walk_cache

token_lists = st.lists(st.integers(0, 3), max_size=24)
sizes = st.integers(1, 5)
salts = st.text(max_size=3)


def hashes_of(tokens, size, salt=""):
    hashes = []
    extend_hashes(hashes, tokens, size, salt)
    return hashes


@given(token_lists, sizes, salts)
def test_only_full_blocks_have_hashes(tokens, size, salt):
    assert len(hashes_of(tokens, size, salt)) == len(tokens) // size


@given(token_lists, sizes, salts)
def test_hashing_token_by_token_is_hashing_all_at_once(tokens, size, salt):
    grown = []
    for stop in range(len(tokens) + 1):
        extend_hashes(grown, tokens[:stop], size, salt)
    assert grown == hashes_of(tokens, size, salt)


@given(token_lists, token_lists, sizes)
def test_hashes_agree_exactly_as_far_as_the_prefixes_do(left, right, size):
    a, b = hashes_of(left, size), hashes_of(right, size)
    for i in range(min(len(a), len(b))):
        assert (a[i] == b[i]) == (left[: (i + 1) * size] == right[: (i + 1) * size])


@given(token_lists, sizes, st.data())
def test_changing_a_token_changes_its_block_and_all_behind(tokens, size, data):
    assume(tokens)
    j = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:j], 9, *tokens[j + 1 :]]
    same = [x == y for x, y in zip(hashes_of(tokens, size), hashes_of(changed, size), strict=True)]
    assert same == [i < j // size for i in range(len(same))]


@given(token_lists, sizes, salts, salts)
def test_two_salts_never_share_a_block(tokens, size, one, other):
    assume(one != other)
    assert not set(hashes_of(tokens, size, one)) & set(hashes_of(tokens, size, other))


@given(salts, salts, token_lists, token_lists)
def test_salt_and_tokens_can_not_be_mistaken_for_each_other(salt, other, tokens, others):
    same = hash_block(ROOT_HASH, tokens, salt) == hash_block(ROOT_HASH, others, other)
    assert same == ((salt, tokens) == (other, others))


class Published(set):
    """An index that finds what was put in: the hash itself stands for the block."""

    def find(self, block_hash):
        return block_hash if block_hash in self else None


@given(token_lists, sizes, st.data())
def test_a_hit_is_the_longest_published_prefix_that_leaves_a_token_to_compute(tokens, size, data):
    hashes = hashes_of(tokens, size)
    index = Published(data.draw(st.sets(st.sampled_from(hashes)))) if hashes else Published()
    num_tokens = data.draw(st.integers(0, len(tokens)))
    hits = longest_hit(hashes, num_tokens, size, index)
    assert hits == hashes[: len(hits)]
    assert len(hits) * size <= max(num_tokens - 1, 0)
    more_would_fit = (len(hits) + 1) * size < num_tokens
    assert not (more_would_fit and hashes[len(hits)] in index)


@given(sizes, st.integers(1, 6))
def test_a_fully_cached_prompt_computes_between_one_token_and_a_block(size, blocks):
    tokens = list(range(size * blocks))
    hashes = hashes_of(tokens, size)
    left = len(tokens) - size * len(longest_hit(hashes, len(tokens), size, Published(hashes)))
    assert 1 <= left <= size


@given(st.integers(0, 10**9))
def test_lookup_and_eviction_agree_with_token_tuples_and_the_reference_lru(seed):
    walk_cache(seed, steps=60)


@pytest.mark.parametrize("seed", range(40))
def test_freeing_leaves_first_strands_nothing(seed):
    census = walk_cache(seed)
    assert census.num_evicted > 10
    assert census.num_hit > 10
    assert census.max_stranded == 0


def test_freeing_roots_first_strands_blocks_in_nearly_every_run():
    assert sum(walk_cache(seed, free_order="root_first").max_stranded > 0 for seed in range(40)) >= 38


def test_a_chain_evicted_from_its_root_is_lost_as_a_whole():
    hashes = hashes_of(list(range(100_000)), 16)
    index = Published(hashes[1:])
    assert len(hashes) == 6_250
    assert longest_hit(hashes, 100_000, 16, index) == []
    assert len(index) == 6_249

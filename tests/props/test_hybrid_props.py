"""Hits over several groups against their definition, and what a window holds against its bound."""

from hypothesis import given
from hypothesis import strategies as st

from minivllm.config import EngineConfig
from minivllm.kv.block_pool import NULL_BLOCK
from minivllm.kv.hybrid import (
    HybridKVCacheManager,
    form_groups,
    longest_request,
    num_skipped,
    request_blocks,
    window_hit,
)
from tests.builders import make_request

windows = st.one_of(st.none(), st.integers(1, 20))
sizes = st.integers(1, 5)


class Some:
    """An index of the blocks at some places."""

    def __init__(self, places: set[int]) -> None:
        self.places = places

    def find(self, place: int) -> int | None:
        return place if place in self.places else None


def suits(cached: set[int], n: int, needed: int) -> bool:
    """Whether a group with these blocks can go on from block n."""
    return set(range(max(n - needed, 0), n)) <= cached


@given(st.sets(st.integers(0, 11)), st.integers(0, 12), st.integers(0, 14))
def test_a_window_hit_is_the_longest_prefix_whose_tail_is_cached(cached, length, needed):
    hit = window_hit(list(range(length)), needed, Some(cached))
    assert hit == max(n for n in range(length + 1) if suits(cached, n, needed))


@st.composite
def caches(draw: st.DrawFn):
    """A prompt of whole blocks and one token, the windows of some groups, and which blocks each has cached."""
    size, length = draw(sizes), draw(st.integers(0, 10))
    groups = draw(st.lists(windows, min_size=1, max_size=4))
    return size, length, groups, [draw(st.sets(st.integers(0, length))) for _ in groups]


@given(caches())
def test_a_joint_hit_is_the_longest_that_suits_all_groups(cache):
    size, length, groups, cached = cache
    kv = HybridKVCacheManager(EngineConfig(block_size=size), 64, tuple(groups))
    sequence = make_request("r", length * size + 1).sequences[0]
    for group, places in zip(kv.groups, cached, strict=True):
        for place in sorted(places & set(range(length))):
            (block,) = kv.pool.allocate(1)
            kv.pool.publish(block, kv.hashes(sequence)[place] + group.tag)
    needed = [99 if window is None else -(-(window - 1) // size) for window in groups]
    best = max(n for n in range(length + 1) if all(map(suits, cached, [n] * len(groups), needed)))
    hits = kv.lookup(sequence, sequence.num_tokens)
    assert kv.num_cached(hits, None) == best * size
    for i, need in enumerate(needed):
        share = hits[i * best : (i + 1) * best]
        assert [block.id == NULL_BLOCK for block in share] == [place < best - need for place in range(best)]


@given(st.integers(0, 200), st.integers(1, 30), sizes)
def test_skipped_blocks_are_exactly_those_that_no_later_token_sees(num_computed, window, size):
    skipped = num_skipped(num_computed, window, size)
    first_seen = max(num_computed - window + 1, 0)
    assert skipped * size <= first_seen < (skipped + 1) * size


@given(st.lists(windows, min_size=1, max_size=12))
def test_groups_hold_each_layer_once_and_only_layers_with_their_window(layers):
    groups = form_groups(tuple(layers))
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    assert all(layers[layer] == group.window for group in groups for layer in group.layers)
    assert None not in [group.window for group in groups][layers.count(None) :]


@given(st.lists(windows, min_size=1, max_size=3), sizes, st.integers(1, 20), st.lists(st.integers(1, 20), max_size=12))
def test_no_request_holds_more_than_it_is_budgeted(groups, size, budget, chunks):
    config = EngineConfig(block_size=size, max_num_batched_tokens=budget)
    kv = HybridKVCacheManager(config, 2000, tuple(groups))
    chunks = [min(chunk, budget) for chunk in chunks]
    request = make_request("r", max(sum(chunks), 1))
    (sequence,) = request.sequences
    for chunk in chunks:
        assert kv.allocate(sequence, chunk) is not None
        sequence.num_computed += chunk
        assert kv.num_held(request)[0] <= request_blocks(sum(chunks), tuple(groups), config)
        kv.integrity()


@given(st.lists(windows, min_size=1, max_size=3), sizes, st.integers(1, 20), st.integers(0, 99), st.integers(1, 300))
def test_the_longest_request_fits_and_one_token_more_does_not(groups, size, budget, usable, limit):
    config = EngineConfig(block_size=size, max_num_batched_tokens=budget)
    longest = longest_request(usable, tuple(groups), config, limit)
    assert request_blocks(longest, tuple(groups), config) <= usable
    assert longest == limit or request_blocks(longest + 1, tuple(groups), config) > usable

"""The KV cache manager: who holds which blocks, what is shared, what comes back in which order."""

import pytest

from minivllm.config import EngineConfig
from minivllm.kv.manager import CacheStats, KVCacheManager
from minivllm.plan import EventKind
from tests.builders import make_manager, make_request

uids = iter(range(10**9))


def sequences_of(prompt, **params):
    request = make_request("r", prompt, **params)
    for sequence in request.sequences:
        sequence.uid = next(uids)
    return request.sequences


def admit(kv, prompt, **params):
    """The first sequence of a new request, its prompt allocated as a whole, as an admission does."""
    sequence = sequences_of(prompt, **params)[0]
    hits = kv.lookup(sequence, sequence.num_tokens)
    cached = len(hits) * kv.block_size
    assert kv.allocate(sequence, sequence.num_tokens - cached, hits) == []
    sequence.num_computed = sequence.num_tokens
    return sequence


def free_ids(kv):
    return [block.id for block in kv.pool.free_list]


def state(kv):
    return free_ids(kv), [(b.ref_count, b.hash) for b in kv.pool.blocks], {u: t.ids for u, t in kv.tables.items()}


# the story of three prompts over blocks of 16: A of 70 tokens; B shares its first 64 of 80; C is exactly those 64


@pytest.fixture
def kv():
    return make_manager(20, block_size=16)


def test_a_prompt_of_70_takes_five_blocks_and_publishes_four(kv):
    a = admit(kv, list(range(70)))
    assert kv.block_ids(a) == [1, 2, 3, 4, 5]
    assert [block.hash is not None for block in kv.pool.blocks[1:6]] == [True] * 4 + [False]


def test_a_prompt_that_shares_64_tokens_takes_one_block(kv):
    admit(kv, list(range(70)))
    b = admit(kv, [*range(64), *range(900, 916)])
    assert kv.block_ids(b) == [1, 2, 3, 4, 6]


def test_a_fully_cached_prompt_recomputes_its_last_block_into_a_duplicate(kv):
    admit(kv, list(range(70)))
    c = admit(kv, list(range(64)))
    assert kv.block_ids(c) == [1, 2, 3, 6]
    assert kv.pool.blocks[6].hash == kv.pool.blocks[4].hash
    assert kv.pool.find(kv.pool.blocks[4].hash).id == 4


def test_a_prompt_returns_its_tail_to_the_head_and_its_cached_blocks_leaf_first_to_the_end(kv):
    a = admit(kv, list(range(70)))
    kv.free(a)
    assert free_ids(kv) == [5, *range(6, 20), 4, 3, 2, 1]


def test_blocks_that_another_still_uses_only_lose_a_reference(kv):
    a = admit(kv, list(range(70)))
    admit(kv, [*range(64), *range(900, 916)])
    kv.free(a)
    assert free_ids(kv) == [5, *range(7, 20)]
    assert [block.ref_count for block in kv.pool.blocks[1:5]] == [1, 1, 1, 1]


def test_under_pressure_a_chain_is_lost_from_its_leaf(kv):
    kv.free(admit(kv, list(range(70))))
    kv.pool.allocate(16)  # 15 blocks that were never cached, then the first cached one
    again = sequences_of(list(range(70)))[0]
    assert [block.id for block in kv.lookup(again, 70)] == [1, 2, 3]


# lookup


def test_a_request_for_prompt_logprobs_reads_no_cache_but_fills_it():
    kv = make_manager()
    admit(kv, list(range(9)), prompt_logprobs=0)
    assert kv.lookup(sequences_of(list(range(9)), prompt_logprobs=0)[0], 9) == []
    assert len(kv.lookup(sequences_of(list(range(9)))[0], 9)) == 2


def test_a_salt_keeps_tenants_apart():
    kv = make_manager()
    admit(kv, list(range(9)), salt="a")
    assert kv.lookup(sequences_of(list(range(9)), salt="b")[0], 9) == []


def test_hits_are_counted_at_admission_and_only_for_those_who_may_read():
    kv = make_manager()
    kv.record_lookup(sequences_of(10)[0], 8)
    kv.record_lookup(sequences_of(10, prompt_logprobs=0)[0], 0)
    assert (kv.stats.queries, kv.stats.hits, kv.stats.hit_rate) == (10, 8, 0.8)
    assert CacheStats().hit_rate == 0.0


# allocation


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_tokens_take_whole_blocks_and_waste_less_than_one(tokens, blocks):
    kv = make_manager()
    sequence = admit(kv, tokens)
    assert len(kv.block_ids(sequence)) == blocks
    assert 0 <= blocks * 4 - tokens <= 3


def test_growth_takes_a_block_only_at_a_boundary():
    kv = make_manager()
    sequence = admit(kv, 3)
    sizes = []
    for _ in range(6):
        kv.allocate(sequence, 1)
        sequence.num_computed += 1
        sizes.append(len(kv.block_ids(sequence)))
    assert sizes == [1, 2, 2, 2, 2, 3]


def test_what_does_not_fit_changes_nothing():
    kv = make_manager(num_blocks=4)
    admit(kv, list(range(8)))
    before = state(kv)
    again = sequences_of(list(range(20)))[0]
    hits = kv.lookup(again, 20)
    assert len(hits) == 2
    assert kv.allocate(again, 12, hits) is None
    assert state(kv) == before


def test_idle_hits_count_as_needed_because_they_leave_the_free_list():
    kv = make_manager(num_blocks=4)
    kv.free(admit(kv, list(range(9))))
    again = sequences_of(list(range(16)))[0]
    hits = kv.lookup(again, 16)
    assert (len(hits), kv.pool.num_free) == (2, 3)
    assert kv.allocate(again, 8, hits) is None, "two blocks and two idle hits are four, three are free"


def test_allocation_never_evicts_what_it_has_just_hit():
    kv = make_manager(num_blocks=4)
    kv.free(admit(kv, list(range(12))))
    again = sequences_of(list(range(12)))[0]
    hits = kv.lookup(again, 12)
    kv.allocate(again, 4, hits)
    assert kv.block_ids(again)[:2] == [block.id for block in hits]
    assert all(block.hash is not None for block in hits)


def test_the_watermark_keeps_a_share_of_the_blocks_for_those_who_run():
    kv = make_manager(num_blocks=11, watermark=0.2)
    sequence = sequences_of(36)[0]
    assert kv.allocate(sequence, 36, watermark=True) is None
    assert kv.allocate(sequence, 36) == []


def test_only_full_blocks_are_published_and_at_once():
    kv = make_manager()
    sequence = sequences_of(11)[0]
    kv.allocate(sequence, 7)
    assert len(kv.pool.published) == 1
    sequence.num_computed = 7
    kv.allocate(sequence, 4)
    assert len(kv.pool.published) == 2


def test_a_block_is_not_published_beyond_the_tokens_that_are_known():
    kv = make_manager()
    sequence = sequences_of(7)[0]
    kv.allocate(sequence, 8)
    assert len(kv.pool.published) == 1


def test_withdrawing_takes_back_what_the_step_would_have_written_and_no_more():
    kv = make_manager()
    sequence = sequences_of(12)[0]
    kv.allocate(sequence, 4)
    sequence.num_computed = 4
    kv.allocate(sequence, 8)
    assert len(kv.pool.published) == 3
    kv.withdraw(sequence)
    assert kv.pool.published.keys() == {sequence.block_hashes[0]}


# the whole request


def test_a_request_with_answers_counts_its_prompt_once_and_a_tail_for_each():
    kv = make_manager()
    request = make_request("r", 10, n=3)
    assert kv.blocks_of_request(request, [10, 10, 10]) == 2 + 3
    assert kv.blocks_of_request(request, [13, 10, 17]) == 2 + 2 + 1 + 3
    assert kv.blocks_of_request(request, [13]) == 4


def test_whether_a_request_fits_counts_held_hits_as_free_of_charge():
    kv = make_manager(num_blocks=6)
    admit(kv, list(range(9)))
    request = make_request("r", list(range(16)))
    hits = kv.lookup(request.sequences[0], 16)
    assert kv.pool.num_free == 2
    assert kv.fits_whole(request, hits, watermark=False)
    assert not kv.fits_whole(request, [], watermark=False)


# forks


def fork(kv, prompt, n=2):
    trunk, *children = sequences_of(prompt, n=n)
    kv.allocate(trunk, trunk.num_tokens)
    trunk.num_computed = trunk.num_tokens
    for child in children:
        kv.fork(trunk, child)
    return trunk, *children


def test_a_child_starts_from_what_its_parent_has_computed():
    kv = make_manager()
    trunk, child = fork(kv, 6)
    assert child.num_computed == 6
    assert kv.block_ids(child) == kv.block_ids(trunk)
    assert child.block_hashes == trunk.block_hashes
    assert kv.pool.num_free == 16 - 2


def test_siblings_copy_the_shared_tail_and_the_last_one_keeps_it():
    kv = make_manager()
    siblings = fork(kv, 6, n=3)
    copies = [kv.allocate(sequence, 1) for sequence in siblings]
    assert copies == [[(2, 3)], [(2, 4)], []]
    assert [kv.block_ids(sequence) for sequence in siblings] == [[1, 3], [1, 4], [1, 2]]


def test_a_prompt_that_ends_on_a_block_boundary_needs_no_copy():
    kv = make_manager()
    trunk, child = fork(kv, 8)
    assert kv.allocate(trunk, 1) == kv.allocate(child, 1) == []
    assert (kv.block_ids(trunk), kv.block_ids(child)) == ([1, 2, 3], [1, 2, 4])


def test_a_copy_needs_a_free_block():
    kv = make_manager(num_blocks=3)
    trunk, _ = fork(kv, 6)
    before = state(kv)
    assert kv.allocate(trunk, 1) is None
    assert state(kv) == before


def test_freeing_everybody_fills_the_pool_again():
    kv = make_manager()
    for sequence in fork(kv, 6, n=3):
        kv.free(sequence)
        kv.free(sequence)  # one that holds nothing has nothing to give up
    assert kv.pool.num_free == kv.pool.num_usable
    kv.integrity()


def test_integrity_notices_a_reference_without_a_table():
    kv = make_manager()
    sequence = admit(kv, 6)
    kv.pool.touch(kv.tables[sequence.uid].blocks)
    with pytest.raises(AssertionError, match="block 1: 2 references, 1 tables"):
        kv.integrity()


def test_every_change_is_an_event():
    seen = []
    kv = KVCacheManager(
        EngineConfig(block_size=4), 9, lambda kind, **details: seen.append((kind, details.get("blocks")))
    )
    kv.free(admit(kv, list(range(9))))
    admit(kv, list(range(9)))
    assert seen == [
        (EventKind.ALLOCATED, (1, 2, 3)),
        (EventKind.PUBLISHED, (1,)),
        (EventKind.PUBLISHED, (2,)),
        (EventKind.FREED, (3, 2, 1)),
        (EventKind.HIT, (1, 2)),
        (EventKind.ALLOCATED, (3,)),
    ]

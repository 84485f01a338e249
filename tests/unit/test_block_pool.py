"""The block pool: three places for a block, one order for handing out, one index of what is cached."""

import pytest

from minivllm.config import ConfigError
from minivllm.kv.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks


def ids(blocks):
    return [block.id for block in blocks]


def publish(pool, blocks):
    for block in blocks:
        pool.publish(block, f"hash {block.id}".encode())


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(4)
    assert pool.num_usable == 3
    assert ids(pool.allocate(3)) == [1, 2, 3]


def test_a_pool_needs_a_block_beside_the_null_block():
    with pytest.raises(ConfigError, match=r"num_kv_blocks=1.*at least 2"):
        BlockPool(1)


def test_asking_for_too_much_takes_nothing():
    pool = BlockPool(4)
    with pytest.raises(OutOfBlocks, match="4 blocks asked for, 3 of 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_cached_blocks_count_as_free():
    pool = BlockPool(5)
    held = pool.allocate(4)
    publish(pool, held)
    pool.free(held[:3])
    assert (pool.num_free, pool.num_usable) == (3, 4)


def test_a_cached_block_without_a_holder_is_free_and_can_be_hit():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    publish(pool, blocks)
    pool.free(blocks)
    assert pool.num_free == 3
    assert pool.find(b"hash 1") is blocks[0]


def test_handing_a_block_out_again_evicts_its_content():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    publish(pool, blocks)
    pool.free(blocks)
    assert pool.allocate(1) == blocks
    assert pool.find(b"hash 1") is None
    assert blocks[0].hash is None


def test_a_hit_takes_a_block_out_of_the_middle_of_the_free_list():
    pool = BlockPool(5)
    pool.touch([pool.blocks[2]])
    assert ids(pool.free_list) == [1, 3, 4]


def test_a_block_stays_held_until_its_last_holder_leaves():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2


def test_cached_blocks_queue_behind_all_others_and_uncached_ones_are_used_next():
    pool = BlockPool(8)
    full, tail = pool.allocate(3), pool.allocate(1)
    publish(pool, full)
    pool.free([*tail, *reversed(full)])
    assert ids(pool.free_list) == [4, 5, 6, 7, 3, 2, 1]


def test_uncached_blocks_keep_the_order_they_are_given_in():
    pool = BlockPool(6)
    pool.allocate(2)
    pool.free([pool.blocks[2], pool.blocks[1]])
    assert ids(pool.free_list) == [2, 1, 3, 4, 5]


def test_the_null_block_can_stand_in_any_list():
    pool = BlockPool(3)
    null = pool.blocks[NULL_BLOCK]
    pool.touch([null])
    pool.publish(null, b"x")
    pool.free([null])
    assert (null.ref_count, null.hash, pool.num_free) == (0, None, 2)


def test_freeing_twice_is_an_error_that_changes_nothing():
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    with pytest.raises(ValueError, match="block 2 is freed more often than it is held"):
        pool.free([one, two, two])
    assert (one.ref_count, two.ref_count) == (1, 1)


def test_equal_content_is_kept_twice_and_found_once():
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    pool.publish(one, b"same")
    pool.publish(two, b"same")
    assert pool.find(b"same") is one
    pool.withdraw(one)
    assert pool.find(b"same") is two


def test_nothing_is_published_with_caching_off():
    pool = BlockPool(3, caching=False)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    assert block.hash is None
    assert pool.find(b"x") is None


def test_the_cache_is_reset_only_while_nobody_holds_a_block():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    publish(pool, blocks)
    assert not pool.reset_prefix_cache()
    pool.free(blocks)
    assert pool.reset_prefix_cache()
    assert pool.published == {}


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda pool: setattr(pool.blocks[1], "ref_count", 1), "lost or free while held"),
        (lambda pool: setattr(pool.blocks[1], "hash", b"x"), "disagree"),
        (lambda pool: setattr(pool.blocks[NULL_BLOCK], "hash", b"x"), "null block is published"),
        (lambda pool: pool.published.update({b"x": {}}), "a hash without a block"),
        (lambda pool: pool.free_list.append(pool.blocks[NULL_BLOCK]), "null block is free"),
        (lambda pool: pool.free_list.pop_head(), "lost or free while held"),
    ],
)
def test_integrity_notices(harm, message):
    pool = BlockPool(4)
    pool.integrity()
    harm(pool)
    with pytest.raises(AssertionError, match=message):
        pool.integrity()

"""Block tables: forking shares, writing copies."""

from minivllm.kv.block_pool import BlockPool
from minivllm.kv.block_table import BlockTable


def table_of(pool, n):
    return BlockTable(pool.allocate(n))


def test_ids_are_in_token_order():
    pool = BlockPool(8)
    pool.allocate(2)
    assert table_of(pool, 3).ids == [3, 4, 5]


def test_a_fork_shares_every_block_and_takes_none():
    pool = BlockPool(8)
    table = table_of(pool, 3)
    free = pool.num_free
    fork = table.fork(pool)
    assert fork.ids == table.ids
    assert pool.num_free == free
    assert [block.ref_count for block in table.blocks] == [2, 2, 2]


def test_a_fork_grows_by_itself():
    pool = BlockPool(8)
    table = table_of(pool, 1)
    fork = table.fork(pool)
    fork.blocks += pool.allocate(1)
    assert len(table.blocks) == 1


def test_a_block_of_ones_own_is_written_in_place():
    assert not table_of(BlockPool(3), 1).needs_copy(0)


def test_a_shared_block_is_copied_before_it_is_written():
    pool = BlockPool(3)
    table = table_of(pool, 1)
    table.fork(pool)
    assert table.needs_copy(0)


def test_a_published_block_is_copied_even_by_its_only_holder():
    pool = BlockPool(3)
    table = table_of(pool, 1)
    pool.publish(table.blocks[0], b"promise")
    assert table.needs_copy(0)


def test_a_copy_leaves_the_others_as_they_were():
    pool = BlockPool(8)
    table = table_of(pool, 2)
    fork = table.fork(pool)
    (fresh,) = pool.allocate(1)
    assert fork.copy_on_write(1, fresh, pool) == (2, 3)
    assert (table.ids, fork.ids) == ([1, 2], [1, 3])
    assert [pool.blocks[i].ref_count for i in (1, 2, 3)] == [2, 1, 1]


def test_the_last_of_the_siblings_writes_in_place():
    pool = BlockPool(8)
    table = table_of(pool, 1)
    fork = table.fork(pool)
    fork.copy_on_write(0, *pool.allocate(1), pool)
    assert not table.needs_copy(0)
    assert not fork.needs_copy(0)

"""Layer groups: who shares a table, what a window needs and gives up, and what a prefix hit needs of each group."""

import pytest

from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.kv.block_pool import NULL_BLOCK
from minivllm.kv.hybrid import (
    ONE_GROUP,
    HybridKVCacheManager,
    LayerGroup,
    form_groups,
    longest_request,
    make_manager,
    num_skipped,
    request_blocks,
    window_cap,
    window_hit,
)
from minivllm.kv.manager import KVCacheManager
from minivllm.plan import EventKind
from tests.builders import make_request

# who shares a table


def test_layers_of_one_kind_form_one_group():
    assert form_groups((None,) * 3) == [LayerGroup(None, (0, 1, 2))]
    assert form_groups((8,) * 3) == [LayerGroup(8, (0, 1, 2))]


def test_alternating_layers_form_two_groups_the_full_one_first():
    assert form_groups((8, None, 8, None)) == [LayerGroup(None, (1, 3)), LayerGroup(8, (0, 2))]


def test_a_kind_with_more_layers_forms_more_groups_of_the_same_size():
    groups = form_groups((8, 8, 8, 8, 8, None) * 2)
    assert [group.window for group in groups] == [None, 8, 8, 8, 8, 8]
    assert {len(group.layers) for group in groups} == {2}
    assert sorted(layer for group in groups for layer in group.layers) == list(range(12))


def test_nearly_as_many_layers_of_each_kind_form_two_groups_with_a_page_to_spare():
    assert form_groups((None, None, None, None, 8, 8, 8)) == [LayerGroup(None, (0, 1, 2, 3)), LayerGroup(8, (4, 5, 6))]


def test_switched_off_all_layers_share_a_table():
    assert form_groups((8, None, 8), "off") == [LayerGroup(None, (0, 1, 2))]


# what a window needs


@pytest.mark.parametrize(
    ("computed", "skipped"),
    [(0, 0), (7, 0), (11, 0), (12, 0), (13, 1), (16, 1), (17, 2), (29, 5)],
)
def test_a_block_is_skipped_once_the_next_window_begins_behind_it(computed, skipped):
    assert num_skipped(computed, window=10, block_size=4) == skipped


def test_a_window_of_one_token_skips_all_full_blocks():
    assert [num_skipped(n, 1, 4) for n in (3, 4, 8)] == [0, 1, 2]


def test_the_cap_is_window_and_step_and_one_block_for_the_misfit():
    assert window_cap(window=10, in_flight=7, block_size=4) == 5
    assert window_cap(window=1, in_flight=1, block_size=16) == 2


def test_a_request_needs_no_more_than_its_tokens_and_no_more_than_the_cap():
    config = EngineConfig(block_size=4, max_num_batched_tokens=8)
    assert request_blocks(8, (None, 5), config) == 2 + 2
    assert request_blocks(100, (None, 5), config) == 25 + 4
    assert longest_request(29, (None, 5), config, 1000) == 100
    assert longest_request(28, (None, 5), config, 1000) == 96
    assert longest_request(29, (None, 5), config, 99) == 99
    assert longest_request(4, (5,), config, 1000) == 1000


# what a hit needs


class Cached:
    """An index of some hashes."""

    def __init__(self, found: str) -> None:
        self.found = found

    def find(self, block_hash: str) -> object | None:
        return self if block_hash in self.found else None


@pytest.mark.parametrize(
    ("cached", "needed", "hit"),
    [
        ("abcdef", 2, 6),
        ("ef", 2, 6),
        ("de", 2, 5),
        ("bcd-f", 2, 4),
        ("a", 2, 1),
        ("ab-d-f", 3, 2),
        ("b", 2, 0),
        ("", 2, 0),
        ("", 0, 6),
        ("c", 1, 3),
        ("abc", 99, 3),
        ("bcdef", 99, 0),
    ],
)
def test_a_window_hit_is_the_last_run_that_is_long_enough(cached, needed, hit):
    assert window_hit("abcdef", needed, Cached(cached)) == hit


# the manager


def make_hybrid(windows=(None, 6), num_blocks=65, **config):
    events = []
    settings = EngineConfig(**{"block_size": 4, "max_num_batched_tokens": 16, **config})
    kv = HybridKVCacheManager(settings, num_blocks, windows, lambda kind, **fields: events.append((kind, fields)))
    return kv, events


def start(kv, id, prompt, uid=0):
    sequence = make_request(id, prompt, max_tokens=50).sequences[0]
    sequence.uid = uid
    return sequence


def run(kv, sequence, num_tokens, step=16):
    """Compute a sequence up to `num_tokens`, as a scheduler would."""
    while sequence.num_computed < num_tokens:
        new = min(step, num_tokens - sequence.num_computed)
        assert kv.allocate(sequence, new) is not None
        sequence.num_computed += new
        kv.integrity()


def test_a_model_without_windows_has_the_plain_manager():
    assert type(make_manager(EngineConfig(), 9, ONE_GROUP)) is KVCacheManager
    assert type(make_manager(EngineConfig(), 9, (None, 8))) is HybridKVCacheManager


def test_each_group_has_its_own_table_and_null_blocks_keep_positions():
    kv, _ = make_hybrid()
    sequence = start(kv, "r", 40)
    run(kv, sequence, 32)
    assert kv.allocate(sequence, 4) is not None
    full, (sliding,) = kv.block_ids(sequence), (kv.groups[1].block_ids(sequence),)
    assert len(full) == len(sliding) == 9
    assert NULL_BLOCK not in full
    assert sliding[:6] == [NULL_BLOCK] * 6  # position 32's window is 27 .. 32: block 6 holds 24 .. 27
    assert NULL_BLOCK not in sliding[6:]
    assert not set(full) & set(sliding)


def test_what_the_window_left_behind_is_freed_the_last_one_first():
    kv, events = make_hybrid()
    sequence = start(kv, "r", 40)
    run(kv, sequence, 16)
    (before,) = (kv.groups[1].block_ids(sequence),)
    events.clear()
    kv.allocate(sequence, 16)
    freed = [fields for kind, fields in events if kind is EventKind.FREED]
    expected = {"request": "r", "sequence": 0, "blocks": tuple(before[1::-1]), "reason": "window", "group": 1}
    assert freed == [expected]
    assert [block.id for block in kv.pool.free_list][-2:] == before[1::-1]


def test_freed_even_if_the_step_then_finds_no_blocks():
    kv, _ = make_hybrid(num_blocks=13)
    sequence = start(kv, "r", 60)
    run(kv, sequence, 16)
    assert kv.pool.num_free == 4
    assert kv.allocate(sequence, 16) is None
    assert kv.pool.num_free == 6
    kv.integrity()
    assert kv.allocate(sequence, 8) is not None


def test_failing_takes_nothing_from_any_group():
    kv, _ = make_hybrid(num_blocks=7)
    sequence = start(kv, "r", 60)
    assert kv.allocate(sequence, 16) is None
    assert kv.pool.num_free == 6
    assert not kv.all_tables()


def test_a_hit_takes_all_blocks_of_a_full_group_and_the_windows_of_a_sliding_one():
    kv, events = make_hybrid()
    first = start(kv, "a", list(range(40)))
    run(kv, first, 40)
    kv.free(first)
    second = start(kv, "b", list(range(32)) + [99] * 4, uid=1)
    hits = kv.lookup(second, 36)
    assert kv.num_cached(hits, None) == 32
    assert [block.id == NULL_BLOCK for block in hits] == [False] * 8 + [True] * 6 + [False] * 2
    assert kv.allocate(second, 4, hits) == []
    kv.integrity()
    assert [fields["group"] for kind, fields in events if kind is EventKind.HIT] == [0, 1]


def test_a_hit_ends_where_every_group_can_go_on():
    kv, _ = make_hybrid()
    first = start(kv, "a", list(range(40)))
    run(kv, first, 40)
    tail = kv.groups[1].tables[first.uid].blocks[7]
    kv.free(first)
    kv.pool.withdraw(tail)
    second = start(kv, "b", list(range(40)), uid=1)
    assert kv.num_cached(kv.lookup(second, 37), None) == 28  # 36 and 32 need block 7 of the sliding group
    kv.pool.withdraw(kv.groups[0].find(second.block_hashes[4]))
    assert kv.num_cached(kv.lookup(second, 37), None) == 16


def test_looking_up_changes_nothing():
    kv, _ = make_hybrid()
    first = start(kv, "a", list(range(40)))
    run(kv, first, 40)
    kv.free(first)
    before = [block.id for block in kv.pool.free_list]
    kv.lookup(start(kv, "b", list(range(40)), uid=1), 40)
    assert [block.id for block in kv.pool.free_list] == before


def test_admission_asks_for_the_window_and_not_for_the_prompt():
    kv, _ = make_hybrid(num_blocks=33)
    request = make_request("r", 100, max_tokens=1)
    assert kv.blocks_of_request(request, [100]) == 25 + 7
    assert kv.fits_whole(request, [], watermark=False)
    assert not HybridKVCacheManager(EngineConfig(block_size=4), 33, (None, None)).fits_whole(
        request, [], watermark=False
    )


def test_the_watermark_is_kept_free_by_all_groups_together():
    for prompt, fits in ((16, True), (17, False)):
        kv, _ = make_hybrid(num_blocks=11, watermark=0.2)  # two of ten blocks stay free
        sequence = start(kv, "r", prompt)
        assert (kv.allocate(sequence, prompt, watermark=True) is not None) is fits
        assert fits or kv.allocate(sequence, prompt) is not None


def test_a_block_whose_last_token_came_later_is_published_in_every_group():
    kv, events = make_hybrid(publish_at="compute")
    sequence = start(kv, "r", 8)
    kv.allocate(sequence, 8)
    assert EventKind.PUBLISHED not in [kind for kind, _ in events]
    kv.publish(sequence, 8)
    published = [block for kind, fields in events if kind is EventKind.PUBLISHED for block in fields["blocks"]]
    assert published == [*kv.groups[0].block_ids(sequence), *kv.groups[1].block_ids(sequence)]


def test_a_fork_shares_what_is_in_the_window_and_copies_before_it_writes():
    kv, _ = make_hybrid()
    request = make_request("r", 34, max_tokens=20, n=2)
    trunk, child = request.sequences
    trunk.uid, child.uid = 0, 1
    run(kv, trunk, 34)
    kv.fork(trunk, child)
    assert kv.num_held(request) == (9 + 3, 2 * (9 + 3))  # the last step began at 32, its window at 27: blocks 6 to 8
    trunk.output_token_ids.append(1)
    copies = kv.allocate(trunk, 1)
    assert len(copies) == 2
    kv.release(copies)
    kv.integrity()
    kv.free(trunk)
    kv.free(child)
    assert kv.pool.num_free == kv.pool.num_usable


def test_hits_inside_blocks_are_refused():
    with pytest.raises(ConfigError, match="partial_block_hits=True: needs layers of one kind"):
        make_hybrid(partial_block_hits=True)


def test_the_cache_can_be_reset_and_counts_what_it_was_asked():
    kv, _ = make_hybrid()
    first = start(kv, "a", list(range(40)))
    run(kv, first, 40)
    assert not kv.reset_prefix_cache()
    kv.free(first)
    assert kv.reset_prefix_cache()
    assert kv.lookup(first, 40) == []


# a model's windows


def model(**changes):
    return ModelConfig("llama", 8, 8, 8, 2, 1, 1, 4, **changes)


def test_windows_are_given_by_layer_or_for_all():
    assert model().windows == (None, None)
    assert model(sliding_window=8).windows == (8, 8)
    assert model(sliding_window=8, layer_kinds=("full", "sliding")).windows == (None, 8)


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 0}, {"layer_kinds": ("full", "sliding")}, {"layer_kinds": ("full",)}]
)
def test_windows_that_make_no_sense_are_refused(changes):
    with pytest.raises(ConfigError, match=r"sliding_window|layer_kinds"):
        model(**changes)

"""Hits that end inside a block: what is found, what is copied, and what it costs."""

import pytest

from minivllm.config import ConfigError, EngineConfig
from minivllm.kv.partial import PartialHit, PartialIndex, common_length
from minivllm.plan import EventKind
from tests.builders import events, finish, make_request, make_scheduler, shares, step

ROOT = (b"root", "")

# the index


def test_the_block_with_the_longest_common_beginning_wins():
    index = PartialIndex()
    index.record(1, ROOT, [5, 6])
    index.record(2, ROOT, [5, 6, 7, 8])
    index.record(3, ROOT, [9])
    assert index.find(ROOT, [5, 6, 7, 1]) == PartialHit(2, 3)
    assert index.find(ROOT, [5, 1]) == PartialHit(1, 1), "the first of equal ones"
    assert index.find(ROOT, [1]) is None


def test_blocks_are_only_found_behind_their_own_prefix():
    index = PartialIndex()
    index.record(1, ROOT, [5, 6])
    assert index.find((b"other", ""), [5, 6]) is None
    assert index.find((b"root", "tenant"), [5, 6]) is None


def test_a_block_that_was_handed_out_is_forgotten():
    index = PartialIndex()
    index.record(1, ROOT, [5])
    index.forget([1, 2])
    assert index.find(ROOT, [5]) is None
    index.forget([1])


@pytest.mark.parametrize(("one", "other", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1)])
def test_common_length(one, other, length):
    assert common_length(one, other) == common_length(other, one) == length


# in the engine: blocks of 4


def served(prompt, again, **config):
    """A scheduler where `prompt` has been answered and `again` takes its first step: its scheduler and that step's plan."""
    scheduler = make_scheduler(partial_block_hits=True, **config)
    scheduler.add(make_request("first", prompt, max_tokens=1))
    finish(scheduler)
    scheduler.add(request := make_request("again", again))
    return scheduler, request, step(scheduler)


def test_a_prompt_asked_twice_computes_one_token():
    _, request, plan = served(list(range(8)), list(range(8)))
    assert (request.num_cached_tokens, shares(plan)) == (7, {"again": 1})


def test_a_published_block_is_copied_for_the_tokens_that_agree():
    scheduler, request, plan = served(list(range(8)), [0, 1, 2, 3, 4, 5, 99, 98])
    assert request.num_cached_tokens == 6
    (copy,) = plan.copies
    assert copy == (2, scheduler.kv.block_ids(request.sequences[0])[1])
    assert [(e.tokens, e.blocks) for e in events(scheduler, EventKind.HIT)] == [(6, (1, 2))]


def test_the_block_that_was_hit_keeps_its_content_and_its_hash():
    scheduler, *_ = served(list(range(8)), [0, 1, 2, 3, 4, 99])
    assert scheduler.kv.pool.blocks[2].hash is not None
    assert scheduler.kv.pool.blocks[2].ref_count == 0


def test_the_copied_block_cannot_be_evicted_before_it_is_copied():
    scheduler = make_scheduler(num_blocks=6, max_model_len=20, partial_block_hits=True)
    scheduler.add(make_request("first", list(range(8)), max_tokens=1))
    finish(scheduler)
    scheduler.add(make_request("again", [0, 1, 2, 3, 4, *range(50, 57)]))
    plan = scheduler.schedule()
    assert plan.copies == [(2, 3)]
    assert scheduler.kv.pool.blocks[2].ref_count == 1
    assert 2 not in plan.rows[0].block_ids
    scheduler.integrity()


def test_a_block_that_still_grows_can_be_hit():
    scheduler = make_scheduler(partial_block_hits=True)
    scheduler.add(make_request("first", list(range(6)), max_tokens=9))
    step(scheduler)
    scheduler.add(again := make_request("again", [*range(6), 99]))
    plan = step(scheduler)
    assert again.num_cached_tokens == 6
    assert plan.copies == [(2, 3)]


def test_what_the_step_at_hand_will_write_cannot_be_copied_yet():
    scheduler = make_scheduler(partial_block_hits=True)
    scheduler.add(make_request("one", list(range(6))))
    scheduler.add(two := make_request("two", list(range(6))))
    plan = step(scheduler)
    assert two.num_cached_tokens == 4, (
        "a full block of the same step may be shared: attention reads after all have written"
    )
    assert not plan.copies


def test_where_there_is_no_room_for_the_block_to_copy_the_hit_stays_whole():
    scheduler = make_scheduler(num_blocks=4, max_model_len=12, partial_block_hits=True)
    for id, prompt in (("first", list(range(8))), ("again", [*range(6), *range(90, 95)])):
        scheduler.add(request := make_request(id, prompt, max_tokens=1))
        finish(scheduler)
    assert request.num_cached_tokens == 4


def test_without_the_switch_hits_are_whole_blocks():
    scheduler = make_scheduler()
    scheduler.add(make_request("first", list(range(8)), max_tokens=1))
    finish(scheduler)
    scheduler.add(again := make_request("again", list(range(8))))
    assert not step(scheduler).copies
    assert again.num_cached_tokens == 4


def test_salts_and_prompt_logprobs_keep_out_of_it():
    scheduler = make_scheduler(partial_block_hits=True)
    scheduler.add(make_request("first", list(range(6)), max_tokens=1))
    finish(scheduler)
    others = make_request("salted", list(range(6)), salt="x"), make_request("scored", list(range(6)), prompt_logprobs=0)
    for request in others:
        scheduler.add(request)
    step(scheduler)
    assert [r.num_cached_tokens for r in others] == [0, 0]


def test_a_reset_forgets_what_could_be_copied():
    scheduler = make_scheduler(partial_block_hits=True)
    scheduler.add(make_request("first", list(range(6)), max_tokens=1))
    finish(scheduler)
    assert scheduler.kv.reset_prefix_cache()
    scheduler.add(again := make_request("again", list(range(6))))
    step(scheduler)
    assert again.num_cached_tokens == 0


def test_it_needs_the_prefix_cache():
    with pytest.raises(ConfigError, match="partial_block_hits=True: needs enable_prefix_caching"):
        EngineConfig(partial_block_hits=True, enable_prefix_caching=False)

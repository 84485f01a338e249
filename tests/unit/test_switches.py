"""Every switch to teach with changes what it says it changes: one experiment each, with its numbers."""

import pytest

from minivllm.config import ConfigError, EngineConfig
from minivllm.plan import EventKind
from tests.builders import events, finish, ids, make_request, make_scheduler, shares, step

PROMPT = list(range(17))
"""Four full blocks of 4 and one token."""


def first_rows(scheduler):
    """The order in which requests first run."""
    return list(dict.fromkeys(e.request for e in events(scheduler, EventKind.SCHEDULED)))


def three_of_rising_importance(policy):
    scheduler = make_scheduler(policy=policy, max_num_seqs=1)
    for id, priority in (("low", 2), ("middle", 1), ("high", 0)):
        scheduler.add(make_request(id, 3, max_tokens=1, priority=priority))
    finish(scheduler)
    return first_rows(scheduler)


def test_policy_fcfs_looks_at_arrival_and_priority_at_importance():
    assert three_of_rising_importance("fcfs") == ["low", "middle", "high"]
    assert three_of_rising_importance("priority") == ["high", "middle", "low"]


def batch_steps(policy):
    """Two rounds of answers of 2, 2, 2 and 10 tokens on four places."""
    scheduler = make_scheduler(policy=policy, max_num_seqs=4)
    for i, length in enumerate([2, 2, 2, 10] * 2):
        scheduler.add(make_request(f"r{i}", 1, max_tokens=length))
    return len(finish(scheduler))


def test_policy_static_lasts_as_long_as_its_longest_answers_and_fcfs_fills_the_gaps():
    assert batch_steps("static") == 20
    assert batch_steps("fcfs") == 14


def test_policy_static_admits_nobody_until_the_batch_is_done():
    scheduler = make_scheduler(policy="static")
    scheduler.add(make_request("a", 3, max_tokens=3))
    step(scheduler)
    scheduler.add(make_request("b", 3))
    assert [shares(step(scheduler)) for _ in range(3)] == [{"a": 1}, {"a": 1}, {"b": 3}]


def hit_after_one_eviction(free_order):
    """Tokens that a prompt finds of itself after somebody took one cached block."""
    scheduler = make_scheduler(num_blocks=17, max_model_len=24, free_order=free_order)
    scheduler.add(make_request("r", PROMPT, max_tokens=1))
    finish(scheduler)
    pool = scheduler.kv.pool
    pool.free(pool.allocate(12 + 1))  # somebody needs all that were never cached, and one more
    again = make_request("again", PROMPT, max_tokens=1)
    scheduler.add(again)
    step(scheduler)
    return again.num_cached_tokens


def test_free_order_leaf_first_loses_one_block_and_root_first_the_whole_chain():
    assert hit_after_one_eviction("leaf_first") == 12
    assert hit_after_one_eviction("root_first") == 0


def twins(publish_at):
    """What two equal prompts of one step run."""
    scheduler = make_scheduler(publish_at=publish_at)
    scheduler.add(make_request("a", PROMPT))
    scheduler.add(make_request("b", PROMPT))
    return shares(step(scheduler)), scheduler.kv.pool.num_usable - scheduler.kv.pool.num_free


def test_publish_at_schedule_lets_a_twin_in_the_same_step_share():
    assert twins("schedule") == ({"a": 17, "b": 1}, 6)
    assert twins("compute") == ({"a": 17, "b": 17}, 10)


def test_publish_at_compute_is_found_from_the_next_step_on():
    scheduler = make_scheduler(publish_at="compute")
    scheduler.add(make_request("a", PROMPT))
    step(scheduler)
    scheduler.add(make_request("b", PROMPT))
    assert shares(step(scheduler)) == {"a": 1, "b": 1}


def long_prompt_beside_another(reserve):
    """A pool of 8 blocks of which 4 are held; a prompt of 5 blocks comes, 8 tokens fit a step."""
    scheduler = make_scheduler(num_blocks=9, max_model_len=32, reserve_full_prompt=reserve, max_num_batched_tokens=9)
    scheduler.add(make_request("a", 14))
    step(scheduler)
    step(scheduler)
    scheduler.add(make_request("long", 20))
    return shares(step(scheduler)), [e.reason for e in events(scheduler, EventKind.REFUSED, "long")]


def test_reserve_full_prompt_starts_no_prompt_that_does_not_fit_now():
    assert long_prompt_beside_another(True) == ({"a": 1}, ["blocks for the whole prompt"])
    assert long_prompt_beside_another(False) == ({"a": 1, "long": 8}, [])


def prompt_beside_decodes(threshold):
    scheduler = make_scheduler(long_prefill_threshold=threshold, max_num_batched_tokens=20)
    scheduler.add(make_request("a", 1))
    step(scheduler)
    scheduler.add(make_request("long", 18))
    scheduler.add(make_request("short", 3))
    return shares(step(scheduler))


def test_long_prefill_threshold_leaves_budget_to_those_behind_a_long_prompt():
    assert prompt_beside_decodes(0) == {"a": 1, "long": 18, "short": 1}
    assert prompt_beside_decodes(8) == {"a": 1, "long": 8, "short": 3}


def test_long_prefill_threshold_does_not_slow_a_request_that_is_alone():
    scheduler = make_scheduler(long_prefill_threshold=8)
    scheduler.add(make_request("long", 18))
    assert shares(step(scheduler)) == {"long": 18}


def test_long_prefill_threshold_needs_chunking():
    with pytest.raises(ConfigError, match="long_prefill_threshold=8: splits prompts"):
        EngineConfig(long_prefill_threshold=8, enable_chunked_prefill=False)


def second_round(caching):
    """Tokens that a repeated prompt runs."""
    scheduler = make_scheduler(enable_prefix_caching=caching)
    for id in "ab":
        scheduler.add(make_request(id, PROMPT, max_tokens=1))
        (plan,) = finish(scheduler)
    return plan.num_tokens, len(events(scheduler, EventKind.PUBLISHED))


def test_enable_prefix_caching_spares_a_repeated_prompt():
    assert second_round(True) == (1, 4)
    assert second_round(False) == (17, 0)


def steps_of_a_prompt_that_meets_a_decode(chunked):
    scheduler = make_scheduler(max_model_len=20, max_num_batched_tokens=20, enable_chunked_prefill=chunked)
    scheduler.add(make_request("a", 12, max_tokens=2))
    scheduler.add(make_request("b", 12, max_tokens=1))
    return [shares(plan) for plan in finish(scheduler)]


def test_enable_chunked_prefill_fills_a_step_with_part_of_a_prompt():
    assert steps_of_a_prompt_that_meets_a_decode(True) == [{"a": 12, "b": 8}, {"a": 1, "b": 4}]
    assert steps_of_a_prompt_that_meets_a_decode(False) == [{"a": 12}, {"a": 1, "b": 12}]


def test_without_chunked_prefill_a_prompt_may_take_exactly_what_is_left_of_a_step():
    scheduler = make_scheduler(max_model_len=20, max_num_batched_tokens=20, enable_chunked_prefill=False)
    scheduler.add(make_request("a", 2, max_tokens=9))
    step(scheduler)
    scheduler.add(make_request("b", 19, max_tokens=1))
    assert shares(step(scheduler)) == {"a": 1, "b": 19}


def blocks_used_next(lifo):
    """The block that a request gets after another gave back one that was never full."""
    scheduler = make_scheduler(num_blocks=9, max_model_len=16, lifo_unhashed=lifo)
    scheduler.add(make_request("a", 2, max_tokens=1))
    finish(scheduler)
    scheduler.add(make_request("b", 2, max_tokens=1))
    return step(scheduler).rows[0].block_ids


def test_lifo_unhashed_uses_a_warm_block_again_at_once():
    assert blocks_used_next(True) == [1]
    assert blocks_used_next(False) == [2]


def admitted_beside_another(watermark):
    """Whether a prompt of 3 blocks is admitted where 4 of 8 are free."""
    scheduler = make_scheduler(num_blocks=9, max_model_len=32, watermark=watermark)
    scheduler.add(make_request("a", 13))
    step(scheduler)
    scheduler.add(make_request("b", 12))
    step(scheduler)
    return ids(scheduler.running)


def test_watermark_keeps_blocks_for_those_who_run():
    assert admitted_beside_another(0.0) == ["a", "b"]
    assert admitted_beside_another(0.24) == ["a", "b"]
    assert admitted_beside_another(0.25) == ["a"]


def test_watermark_does_not_hold_for_the_first():
    scheduler = make_scheduler(num_blocks=9, max_model_len=32, watermark=0.9)
    scheduler.add(make_request("a", 28))
    assert shares(step(scheduler)) == {"a": 28}


def test_max_num_batched_tokens_is_shared_by_all():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    for id in "abc":
        scheduler.add(make_request(id, 6))
    assert [shares(step(scheduler)) for _ in range(2)] == [{"a": 6, "b": 4}, {"a": 1, "b": 2, "c": 6}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("block_size", "16"),
        ("block_size", True),
        ("block_size", 1.5),
        ("num_kv_blocks", 0),
        ("memory_utilization", 1.5),
        ("dtype", None),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_model_len", 0),
        ("watermark", 1.0),
        ("long_prefill_threshold", -1),
        ("policy", "lifo"),
        ("free_order", "random"),
        ("publish_at", "never"),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value!r}: must be"):
        EngineConfig(**{field: value})

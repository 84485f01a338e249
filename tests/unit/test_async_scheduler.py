"""Steps planned ahead, one at a time: what is counted, what is dropped, and when blocks come back."""

import pytest

from minivllm.config import ConfigError, EngineConfig
from minivllm.plan import EventKind
from minivllm.request import BeamParams, Request, SampledToken
from minivllm.sched.async_sched import log_awaited
from minivllm.sched.trace import TraceHeader, replay
from tests.builders import draw, events, make_request, make_scheduler, shares

EOS = 2


def make(**config):
    return make_scheduler(eos=(EOS,), async_depth=1, **config)


def drive(scheduler, *tokens):
    """Plan a step before the one before has completed, once for each token; each token is drawn by all who draw.

    Returns the plans; the last one is still on its way.
    """
    plans = [*scheduler.in_flight.plans.values()]
    for token in tokens:
        plans.append(scheduler.schedule())
        if len(plans) > 1:
            scheduler.update(plans[-2], draw(plans[-2], token))
    return plans


def land(scheduler, token=7):
    """Nobody plans any more: what is on its way completes."""
    for plan in list(scheduler.in_flight.plans.values()):
        scheduler.update(plan, draw(plan, token))


def one(scheduler, *args, **kwargs):
    request = make_request(*args, **kwargs)
    scheduler.add(request)
    return request.sequences[0]


def test_a_token_counts_from_the_step_that_draws_it():
    scheduler = make()
    sequence = one(scheduler, "r", 5)
    scheduler.schedule()
    assert (sequence.num_tokens, sequence.num_placeholders, sequence.num_computed) == (5, 1, 5)
    plan = scheduler.schedule()
    assert shares(plan) == {"r": 1}
    assert (sequence.num_tokens, sequence.num_placeholders, sequence.num_computed) == (5, 2, 6)


def test_a_row_runs_the_token_that_was_drawn_last_whether_or_not_the_scheduler_knows_it():
    scheduler = make()
    sequence = one(scheduler, "r", [4, 5])
    first, second = scheduler.schedule(), scheduler.schedule()
    sequence.last_drawn = 9
    assert second.rows[0].token_ids == [9]
    scheduler.update(first, [[SampledToken(9)]])
    assert second.rows[0].token_ids == [9]


def test_a_length_is_known_before_and_costs_no_slot():
    scheduler = make()
    sequence = one(scheduler, "r", 5, max_tokens=2)
    assert [shares(plan) for plan in drive(scheduler, 7, 7, 7)] == [{"r": 5}, {"r": 1}, {}]
    land(scheduler)
    assert sequence.output_token_ids == [7, 7]
    assert not events(scheduler, EventKind.DROPPED)


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": (EOS,), "ignore_eos": True}])
def test_a_token_that_stops_costs_one_slot(params):
    scheduler = make()
    sequence = one(scheduler, "r", 5, max_tokens=9, **params)
    plans = drive(scheduler, 7, 7, EOS, 7)
    assert [shares(plan) for plan in plans] == [{"r": 5}, {"r": 1}, {"r": 1}, {}]
    assert sequence.output_token_ids == [7, EOS]
    assert [(e.tokens, e.reason) for e in events(scheduler, EventKind.DROPPED)] == [(1, "finished")]


def test_blocks_come_back_when_the_last_step_that_writes_them_has_completed():
    scheduler = make()
    pool = scheduler.kv.pool
    one(scheduler, "r", 5, max_tokens=9)
    plans = drive(scheduler, 7, EOS)
    assert not scheduler.has_requests
    assert pool.num_free < pool.num_usable
    scheduler.integrity()
    scheduler.update(plans[-1], draw(plans[-1]))
    assert pool.num_free == pool.num_usable
    assert not scheduler.in_flight.leaving


def test_who_aborts_while_two_steps_are_on_their_way_keeps_blocks_until_both_completed():
    scheduler = make()
    pool = scheduler.kv.pool
    one(scheduler, "r", 5, max_tokens=9)
    plans = [scheduler.schedule(), scheduler.schedule()]
    scheduler.abort("r")
    free = pool.num_free
    scheduler.update(plans[0], draw(plans[0]))
    assert pool.num_free == free
    scheduler.update(plans[1], draw(plans[1]))
    assert pool.num_free == pool.num_usable


def preempted():
    """Two requests fill the pool; `two` has left while its second token is drawn. Returns scheduler, `two`, and that plan."""
    scheduler = make(num_blocks=5, max_model_len=16)
    one(scheduler, "one", 7, max_tokens=9)
    two = one(scheduler, "two", 7, max_tokens=9)
    plans = drive(scheduler, 7, 5, 5)
    assert events(scheduler, EventKind.PREEMPTED, "two")
    return scheduler, two, plans


def test_the_late_token_of_a_preempted_request_is_dropped():
    scheduler, two, _ = preempted()
    assert two.output_token_ids == [5]
    assert [(e.request, e.reason) for e in events(scheduler, EventKind.DROPPED)] == [("two", "preempted")]
    assert (two.num_computed, two.num_placeholders) == (0, 0)


def test_who_needs_a_victims_blocks_waits_until_its_step_has_completed():
    _, _, plans = preempted()
    assert [shares(plan) for plan in plans] == [{"one": 7, "two": 7}, {"one": 1, "two": 1}, {}]


def test_the_ends_of_copies_are_waited_for_before_anybody_is_preempted():
    scheduler = make(num_blocks=4, max_model_len=12, partial_block_hits=True)
    one(scheduler, "first", [1, 2, 3, 4, 5, 6, 7], max_tokens=1)
    drive(scheduler, 7)
    land(scheduler)
    again = one(scheduler, "again", [1, 2, 3, 4, 5, 6, 8], max_tokens=5)
    plans = drive(scheduler, 7)
    assert plans[0].copies
    while scheduler.has_requests:
        drive(scheduler, 7)
    land(scheduler)
    assert again.output_token_ids == [7] * 5
    assert not events(scheduler, EventKind.PREEMPTED)


def test_a_block_is_published_when_its_last_token_has_come():
    scheduler = make()
    sequence = one(scheduler, "r", 3, max_tokens=9)
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert not events(scheduler, EventKind.PUBLISHED), "the fourth token isn't known"
    scheduler.update(plans[0], draw(plans[0]))
    assert len(events(scheduler, EventKind.PUBLISHED)) == 1
    assert len(sequence.block_hashes) == 1


def test_several_answers_leave_out_the_step_after_their_prompt():
    scheduler = make()
    scheduler.add(make_request("r", 6, n=3, max_tokens=3))
    plans = drive(scheduler, 7, 7, 7)
    assert [shares(plan) for plan in plans] == [{"r": 6}, {}, {"r": 3}]


def test_while_beams_run_every_step_is_awaited_and_trace_and_log_say_why(caplog):
    caplog.set_level("INFO")
    log_awaited.cache_clear()
    scheduler = make()
    beams = BeamParams(2, 2)
    scheduler.add(Request("search", [3] * 6, beams.sampling, max_tokens=2, beams=beams))
    plan = scheduler.schedule()
    assert plan.awaited
    assert "beams" in events(scheduler, EventKind.AWAITED)[0].reason
    said = "steps are planned one at a time, while there are beams: tokens say which of them go on, and in which blocks"
    assert caplog.messages == [said]
    log_awaited(events(scheduler, EventKind.AWAITED)[0].reason)
    assert caplog.messages == [said], "once"
    scheduler.abort("search")
    one(scheduler, "r", 5)
    assert not scheduler.schedule().awaited


def test_without_the_switch_every_step_is_awaited():
    scheduler = make_scheduler()
    one(scheduler, "r", 5)
    assert scheduler.schedule().awaited
    assert not events(scheduler, EventKind.AWAITED)


def test_the_trace_tells_which_step_completed_while_which_was_planned_and_replays():
    scheduler, _, _ = preempted()
    assert [(e.step, e.start) for e in events(scheduler, EventKind.COMPLETED)] == [(2, 1), (3, 2)]
    header = TraceHeader(EngineConfig(block_size=4, async_depth=1), 5, 16, (EOS,))
    *_, again = replay(header, list(scheduler.recorder.events))
    assert [r.id for r in again.waiting] == ["two"]


def test_only_one_step_can_be_planned_ahead():
    with pytest.raises(ConfigError, match="async_depth=2: must be one of 0, 1"):
        EngineConfig(async_depth=2)

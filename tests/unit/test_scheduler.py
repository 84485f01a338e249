"""The scheduler: who runs next, with how much, and what becomes of everybody else."""

import pytest

from minivllm.config import ConfigError, RequestError
from minivllm.plan import EventKind
from minivllm.request import FinishReason, SampledToken
from tests.builders import draw, events, finish, ids, make_request, make_scheduler, shares, step

# who can never run is refused


def refusal(scheduler, request):
    with pytest.raises(RequestError) as error:
        scheduler.add(request)
    assert not scheduler.has_requests
    assert not events(scheduler, EventKind.ADDED)
    return str(error.value)


def test_a_prompt_needs_a_token():
    assert "at least one token" in refusal(make_scheduler(), make_request("r", []))


def test_a_request_longer_than_the_model_is_refused_with_the_arithmetic():
    message = refusal(make_scheduler(max_model_len=16), make_request("r", 13, max_tokens=4))
    assert message == "prompt='13 tokens': prompt and max_tokens=4 exceed max_model_len=16"


def test_more_answers_than_sequences_may_run_are_refused():
    assert "max_num_seqs=2" in refusal(make_scheduler(max_num_seqs=2), make_request("r", 1, n=3))


def test_answers_whose_tails_can_not_all_fit_are_refused_with_the_arithmetic():
    scheduler = make_scheduler(num_blocks=9, max_model_len=32)
    message = refusal(scheduler, make_request("r", 10, max_tokens=10, n=3))
    assert "3 x (10 prompt + 10 new) tokens can grow to 11 blocks of 4, 8 are usable" in message


def test_answers_that_share_their_prompt_fit_where_as_many_requests_would_not():
    scheduler = make_scheduler(num_blocks=9, max_model_len=32)
    scheduler.add(make_request("r", 24, max_tokens=5, n=2))
    finish(scheduler)
    assert scheduler.num_preemptions == 0


def test_the_last_token_drawn_needs_no_slot():
    scheduler = make_scheduler(num_blocks=4, max_model_len=12)
    scheduler.add(make_request("r", 4, max_tokens=5, n=2))  # 9 tokens each, 8 of them run: a shared block and one each
    finish(scheduler)
    assert scheduler.num_preemptions == 0


def test_an_id_can_be_used_again_only_after_the_end():
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 3))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(make_request("r", 5))
    finish(scheduler)
    scheduler.add(make_request("r", 5))


def test_a_bad_request_disturbs_no_other():
    alone, disturbed = make_scheduler(max_model_len=16), make_scheduler(max_model_len=16)
    for scheduler in (alone, disturbed):
        scheduler.add(make_request("good", 5))
        step(scheduler)
    with pytest.raises(RequestError):
        disturbed.add(make_request("bad", 99))
    finish(alone)
    finish(disturbed)
    assert list(alone.recorder.events) == list(disturbed.recorder.events)


def test_a_pool_too_small_for_one_longest_request_is_refused_at_start():
    with pytest.raises(ConfigError, match="max_model_len=64 needs 16 blocks of 4 tokens, 15 are usable"):
        make_scheduler(num_blocks=16)


def test_without_chunking_a_step_must_hold_the_longest_prompt():
    with pytest.raises(ConfigError, match="raise it to max_model_len=64"):
        make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=63)


# one budget a step


def test_a_prompt_runs_in_one_step_if_the_budget_holds_it():
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 10, max_tokens=3))
    assert [shares(plan) for plan in finish(scheduler)] == [{"r": 10}, {"r": 1}, {"r": 1}]


def test_a_long_prompt_runs_in_chunks_and_draws_only_after_the_last():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("r", 10, max_tokens=2))
    plans = finish(scheduler)
    assert [(row.start, row.stop, len(row.samples)) for plan in plans for row in plan.rows] == [
        (0, 4, 0),
        (4, 8, 0),
        (8, 10, 1),
        (10, 11, 1),
    ]


def test_running_requests_come_first_and_a_newcomer_gets_what_is_left():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    scheduler.add(make_request("old", 5))
    step(scheduler)
    scheduler.add(make_request("new", 9))
    assert shares(step(scheduler)) == {"old": 1, "new": 5}


def test_a_long_running_prompt_locks_newcomers_out():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    scheduler.add(make_request("long", 18))
    scheduler.add(make_request("new", 2))
    assert [shares(step(scheduler)) for _ in range(4)] == [{"long": 6}] * 3 + [{"long": 1, "new": 2}]


def test_counters_advance_when_a_step_is_planned():
    scheduler = make_scheduler()
    request = make_request("r", 10)
    scheduler.add(request)
    scheduler.schedule()
    assert request.sequences[0].num_computed == 10


def test_no_more_sequences_run_than_allowed():
    scheduler = make_scheduler(max_num_seqs=3)
    for id, n in (("a", 2), ("b", 2), ("c", 1)):
        scheduler.add(make_request(id, 3, n=n))
    assert shares(step(scheduler)) == {"a": 3}
    assert [e.reason for e in events(scheduler, EventKind.REFUSED, "b")] == ["max_num_seqs"]


def test_the_first_that_does_not_fit_blocks_those_behind_it():
    scheduler = make_scheduler(num_blocks=6, max_model_len=20)
    for id, prompt in (("a", 9), ("big", 12), ("small", 1)):
        scheduler.add(make_request(id, prompt))
    assert shares(step(scheduler)) == {"a": 9}
    assert ids(scheduler.waiting) == ["big", "small"]


def test_an_idle_scheduler_plans_an_empty_step():
    assert make_scheduler().schedule().rows == []


def test_a_repeated_prompt_in_the_same_step_shares_blocks():
    scheduler = make_scheduler()
    prompt = list(range(9))
    scheduler.add(make_request("a", prompt))
    scheduler.add(make_request("b", prompt))
    plan = step(scheduler)
    assert shares(plan) == {"a": 9, "b": 1}
    assert plan.rows[0].block_ids[:2] == plan.rows[1].block_ids[:2]


def test_tokens_run_are_prompt_and_output_less_the_last_and_the_cached():
    scheduler = make_scheduler()
    for id in "ab":
        request = make_request(id, list(range(9)), max_tokens=5)
        scheduler.add(request)
        ran = sum(plan.num_tokens for plan in finish(scheduler))
        assert ran == 9 + 5 - 1 - request.num_cached_tokens
    assert request.num_cached_tokens == 8


# the end


def ended(scheduler, *tokens, **params):
    """Draw the tokens one a step; the reasons of the end, and what was kept."""
    request = make_request("r", 3, **params)
    scheduler.add(request)
    for token in tokens:
        step(scheduler, token)
    sequence = request.sequences[0]
    return sequence.finish_reason, sequence.stop_reason, sequence.output_token_ids


def test_the_end_token_ends_a_sequence_and_stays_in_its_output():
    assert ended(make_scheduler(eos=(2,)), 7, 2) == (FinishReason.STOP, None, [7, 2])


def test_a_request_may_ignore_the_end_token():
    reason, _, tokens = ended(make_scheduler(eos=(2,)), 2, 2, 2, 2, ignore_eos=True)
    assert (reason, tokens) == (FinishReason.LENGTH, [2, 2, 2, 2])


def test_a_stop_token_is_named_as_the_reason():
    assert ended(make_scheduler(), 7, 9, stop_token_ids=(9,)) == (FinishReason.STOP, 9, [7, 9])


def test_an_end_on_the_last_allowed_token_counts_as_a_stop():
    assert ended(make_scheduler(eos=(2,)), 7, 2, max_tokens=2)[0] is FinishReason.STOP


def test_max_tokens_ends_a_sequence():
    assert ended(make_scheduler(), 7, 7, max_tokens=2) == (FinishReason.LENGTH, None, [7, 7])


def test_a_stop_string_found_outside_ends_a_sequence():
    scheduler = make_scheduler()
    request = make_request("r", 3)
    scheduler.add(request)
    step(scheduler)
    scheduler.stop(request.sequences[0], "###")
    assert (request.sequences[0].finish_reason, request.sequences[0].stop_reason) == (FinishReason.STOP, "###")
    assert not scheduler.has_requests
    scheduler.integrity()


def test_all_blocks_come_back():
    scheduler = make_scheduler()
    for id in "abc":
        scheduler.add(make_request(id, 9, n=2))
    finish(scheduler)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


# abort, in every state


def aborted_cleanly(scheduler, request):
    other = make_request("other", 2)
    scheduler.add(other)
    scheduler.abort(request.id)
    scheduler.integrity()
    assert request.finished
    assert {s.finish_reason for s in request.sequences} <= {FinishReason.ABORT, FinishReason.LENGTH}
    finish(scheduler)
    assert len(other.sequences[0].output_token_ids) == 4
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("n", [1, 3])
def test_abort_before_during_and_after_the_prefill(steps, n):
    scheduler = make_scheduler(max_num_batched_tokens=6)
    request = make_request("r", 9, n=n)
    scheduler.add(request)
    for _ in range(steps):
        step(scheduler)
    aborted_cleanly(scheduler, request)


def test_what_an_aborted_request_drew_meanwhile_is_dropped():
    scheduler = make_scheduler()
    gone, other = make_request("gone", 5, n=2), make_request("other", 5)
    scheduler.add(gone)
    scheduler.add(other)
    plan = scheduler.schedule()
    scheduler.abort("gone")
    scheduler.update(plan, [[SampledToken(1), SampledToken(2)], [SampledToken(3)]])
    assert [s.output_token_ids for s in (*gone.sequences, *other.sequences)] == [[], [], [3]]
    scheduler.integrity()


def test_an_id_reused_while_its_aborted_step_still_runs_gets_no_foreign_token():
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 5))
    plan = scheduler.schedule()
    scheduler.abort("r")
    second = make_request("r", 6)
    scheduler.add(second)
    scheduler.update(plan, draw(plan))
    assert second.sequences[0].output_token_ids == []


def test_aborting_who_is_not_there_does_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 5))
    finish(scheduler)
    scheduler.abort("r")
    scheduler.abort("nobody")
    assert not events(scheduler, EventKind.ABORTED)

"""The scheduler: who runs next, with how much, and what becomes of everybody else."""

import pytest

from minivllm.config import ConfigError, RequestError
from minivllm.plan import EventKind
from minivllm.request import FinishReason, SampledToken, Status
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


def test_abort_of_a_preempted_request():
    scheduler, victim = tight_pair()
    assert victim.status is Status.PREEMPTED
    aborted_cleanly(scheduler, victim)


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


# preemption


def tight_pair():
    """Two requests of 8 and 7 tokens in four blocks of 4; in the second step one had to leave for the other's ninth token."""
    scheduler = make_scheduler(num_blocks=5, max_model_len=16)
    two = make_request("two", 7)
    scheduler.add(make_request("one", 8))
    scheduler.add(two)
    step(scheduler)
    step(scheduler)
    return scheduler, two


def test_the_last_admitted_is_preempted_with_nothing_computed():
    scheduler, two = tight_pair()
    assert [e.request for e in events(scheduler, EventKind.PREEMPTED)] == ["two"]
    assert (two.status, two.sequences[0].num_computed, two.num_preemptions) == (Status.PREEMPTED, 0, 1)
    assert ids(scheduler.running) == ["one"]


def test_a_preempted_request_keeps_its_tokens_and_goes_on_where_it_was():
    scheduler, two = tight_pair()
    drawn = list(two.sequences[0].output_token_ids)
    finish(scheduler, token=8)
    assert drawn == [7]
    assert two.sequences[0].output_token_ids == [7, 8, 8, 8]


def test_a_preempted_request_finds_what_nobody_took_of_its_blocks():
    scheduler, _ = tight_pair()
    assert not events(scheduler, EventKind.HIT)
    finish(scheduler)
    assert [e.tokens for e in events(scheduler, EventKind.HIT, "two")] == [4]


def test_hits_after_a_preemption_are_not_counted_as_cached_prompt():
    scheduler, two = tight_pair()
    finish(scheduler)
    assert two.num_cached_tokens == 0
    assert (scheduler.kv.stats.queries, scheduler.kv.stats.hits) == (15, 0)


def test_a_step_that_preempts_admits_nobody():
    scheduler = make_scheduler(num_blocks=5, max_model_len=16)
    for id, prompt in (("one", 8), ("two", 7)):
        scheduler.add(make_request(id, prompt))
    step(scheduler)
    scheduler.add(make_request("tiny", 1, max_tokens=1))
    assert shares(step(scheduler)) == {"one": 1}
    assert scheduler.kv.pool.num_free == 1, "there was room"
    assert ids(scheduler.waiting) == ["two", "tiny"]


def test_several_victims_come_back_in_their_order():
    scheduler = make_scheduler(num_blocks=7, max_model_len=24)
    for id in ("one", "two", "three"):
        scheduler.add(make_request(id, 8, max_tokens=9))
    scheduler.add(make_request("four", 1))
    step(scheduler)
    step(scheduler)
    assert ids(scheduler.running) == ["one", "two"]
    assert ids(scheduler.waiting) == ["three", "four"]
    for _ in range(4):
        step(scheduler)
    assert ids(scheduler.waiting) == ["two", "three", "four"]


def overtaken(prompt):
    """Two steps into an unimportant request of so many tokens, an important one of 8 has filled the other half of the pool."""
    scheduler = make_scheduler(num_blocks=5, max_model_len=16, policy="priority")
    scheduler.add(make_request("low", prompt, priority=1))
    step(scheduler)
    scheduler.add(make_request("high", 8, priority=0))
    step(scheduler)
    return scheduler


def test_under_priority_the_least_important_leaves_even_if_it_has_its_row_already():
    scheduler = overtaken(6)
    assert shares(step(scheduler)) == {"high": 1}
    assert ids(scheduler.waiting) == ["low"]


def test_hashes_are_withdrawn_when_their_victim_leaves_the_step():
    scheduler = overtaken(6)
    before = set(scheduler.kv.pool.published)
    step(scheduler)
    (withdrawn,) = events(scheduler, EventKind.WITHDRAWN)
    assert withdrawn.blocks in [e.blocks for e in events(scheduler, EventKind.PUBLISHED) if e.step == 3]
    assert set(scheduler.kv.pool.published) == before


def test_a_victim_without_a_new_full_block_has_nothing_to_withdraw():
    scheduler = overtaken(5)
    step(scheduler)
    assert ids(scheduler.waiting) == ["low"]
    assert not events(scheduler, EventKind.WITHDRAWN)


def test_the_least_important_preempts_itself_if_it_comes_first_and_the_step_may_stay_empty():
    scheduler = overtaken(7)
    assert step(scheduler).rows == []
    assert ids(scheduler.waiting) == ["low"]
    finish(scheduler)


def test_a_newcomer_preempts_nobody_however_important():
    scheduler = make_scheduler(num_blocks=5, max_model_len=16, policy="priority")
    scheduler.add(make_request("low", 13, priority=9, max_tokens=3))
    step(scheduler)
    scheduler.add(make_request("high", 5, priority=0))
    assert shares(step(scheduler)) == {"low": 1}
    assert scheduler.num_preemptions == 0


# several answers to one prompt


def test_the_prompt_of_several_answers_runs_once_and_each_draws_from_it():
    scheduler = make_scheduler()
    request = make_request("r", 6, n=3)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert shares(plan) == {"r": 6}
    assert plan.rows[0].samples == tuple(request.sequences)
    scheduler.update(plan, [[SampledToken(1), SampledToken(2), SampledToken(3)]])
    assert [s.output_token_ids for s in request.sequences] == [[1], [2], [3]]
    assert scheduler.kv.pool.usage * scheduler.kv.pool.num_usable == 2, "all share two blocks"


def test_siblings_copy_the_tail_they_share_when_they_write():
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 6, n=3))
    step(scheduler)
    plan = step(scheduler)
    assert plan.copies == [(2, 3), (2, 4)]
    assert [row.block_ids for row in plan.rows] == [[1, 3], [1, 4], [1, 2]]


def test_a_prompt_in_chunks_forks_only_after_its_last():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("r", 6, n=2))
    step(scheduler)
    assert not events(scheduler, EventKind.FORKED)
    step(scheduler)
    assert len(events(scheduler, EventKind.FORKED)) == 1


def test_answers_end_one_by_one():
    scheduler = make_scheduler(eos=(2,))
    request = make_request("r", 6, n=2)
    scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.update(plan, [[SampledToken(2), SampledToken(5)]])
    assert request.sequences[0].finished
    assert not request.finished
    assert len(step(scheduler).rows) == 1
    finish(scheduler)
    assert [len(s.output_token_ids) for s in request.sequences] == [1, 4]


def test_all_answers_may_end_with_their_first_token():
    scheduler = make_scheduler(eos=(2,))
    scheduler.add(make_request("r", 6, n=3))
    step(scheduler, token=2)
    assert not scheduler.has_requests
    scheduler.integrity()


def preempted_with_forks():
    """One request and one of two answers behind it; the pool ran full when both answers had drawn three tokens."""
    scheduler = make_scheduler(num_blocks=9, max_model_len=32, enable_prefix_caching=False)
    first, forked = make_request("first", 14, max_tokens=12), make_request("forked", 6, max_tokens=9, n=2)
    scheduler.add(first)
    scheduler.add(forked)
    while not scheduler.num_preemptions:
        step(scheduler)
    return scheduler, forked


def test_a_request_is_preempted_with_all_its_answers():
    scheduler, forked = preempted_with_forks()
    assert [e.request for e in events(scheduler, EventKind.PREEMPTED)] == ["forked"]
    assert all(s.uid not in scheduler.kv.tables and s.num_computed == 0 for s in forked.sequences)
    assert not forked.forked


def test_preempted_answers_compute_their_prompt_once_and_fork_again():
    scheduler, forked = preempted_with_forks()
    drawn = [len(s.output_token_ids) for s in forked.sequences]
    while forked.status is not Status.RUNNING:
        plan = step(scheduler)
    assert (shares(plan)["forked"], plan.rows[-1].samples) == (6, ())
    plan = step(scheduler)
    assert [row.num_tokens for row in plan.rows if row.sequence.request is forked] == drawn
    assert len(events(scheduler, EventKind.FORKED)) == 2


def test_preempted_answers_say_what_they_would_have_said():
    scheduler, forked = preempted_with_forks()
    finish(scheduler)
    assert [s.output_token_ids for s in forked.sequences] == [[7] * 9] * 2


def test_the_last_answer_that_is_left_comes_back_without_a_fork():
    scheduler = make_scheduler(num_blocks=9, max_model_len=32)
    forked = make_request("forked", 6, max_tokens=9, n=2)
    scheduler.add(make_request("first", 14, max_tokens=12))
    scheduler.add(forked)
    step(scheduler)
    scheduler.stop(forked.sequences[0], "###")
    finish(scheduler)
    assert forked.num_preemptions == 1
    assert len(events(scheduler, EventKind.FORKED)) == 1
    assert len(forked.sequences[1].output_token_ids) == 9

"""Who has to leave when blocks run out, how it comes back, and what becomes of several answers to one prompt."""

from minivllm.plan import EventKind
from minivllm.request import FinishReason, SampledToken, Status
from tests.builders import events, finish, ids, make_request, make_scheduler, shares, step

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


def test_a_preempted_request_can_be_aborted():
    scheduler, victim = tight_pair()
    scheduler.abort("two")
    scheduler.integrity()
    assert victim.sequences[0].finish_reason is FinishReason.ABORT
    finish(scheduler)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


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
    assert scheduler.kv.pool.num_usable - scheduler.kv.pool.num_free == 2, "all share two blocks"


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

"""Beams in the scheduler and the cache manager: they step together, fork, copy, are pruned, leave and come back as one."""

import pytest

from minivllm.config import RequestError
from minivllm.plan import EventKind
from minivllm.request import BeamParams, Request, SampledToken, Status
from tests.builders import events, finish, make_request, make_scheduler, shares, step


def beam_request(id="b", prompt=6, width=3, max_tokens=8, **more):
    beams = BeamParams(width, max_tokens)
    tokens = make_request(id, prompt).prompt_token_ids
    return Request(id, tokens, beams.sampling, max_tokens=max_tokens, beams=beams, **more)


def draw_from(plan, *parents):
    """One token for each beam; `parents[i]` is the beam that number i continues, itself if none is given."""
    return [
        [SampledToken(100 + s.index, parent=dict(enumerate(parents)).get(s.index)) for s in row.samples]
        for row in plan.rows
        if row.samples
    ]


def started(width=3, prompt=6, **config):
    """A search whose beams have drawn their first tokens."""
    scheduler = make_scheduler(**config)
    request = beam_request(prompt=prompt, width=width)
    scheduler.add(request)
    scheduler.update(plan := scheduler.schedule(), draw_from(plan))
    return scheduler, request


def tables(scheduler, request):
    return [scheduler.kv.block_ids(s) for s in request.live]


# forking and pruning


def test_a_beam_that_continues_another_shares_its_blocks_and_says_what_it_said():
    scheduler, request = started()
    scheduler.update(plan := scheduler.schedule(), draw_from(plan, None, 0))
    assert tables(scheduler, request) == [[1, 3], [1, 3], [1, 2]]
    assert [s.output_token_ids for s in request.sequences] == [[100, 100], [100, 101], [102, 102]]
    scheduler.integrity()


def test_a_pruned_beam_gives_back_what_only_it_held():
    scheduler, _ = started()
    before = scheduler.kv.pool.num_free
    scheduler.update(plan := scheduler.schedule(), draw_from(plan, None, 0, 0))
    assert plan.copies == [(2, 3), (2, 4)], "three tails"
    assert scheduler.kv.pool.num_free == before, "one tail again"


def test_one_parent_may_have_all_children():
    scheduler, request = started()
    scheduler.update(plan := scheduler.schedule(), draw_from(plan, 2, 2))
    assert len(set(map(tuple, tables(scheduler, request)))) == 1
    plan = scheduler.schedule()
    assert len(plan.copies) == 2, "the last writer keeps the block"


def test_forks_and_tokens_record_their_parents():
    scheduler, _ = started()
    scheduler.update(plan := scheduler.schedule(), draw_from(plan, None, 0))
    fork = events(scheduler, EventKind.FORKED)[-1]
    assert (fork.sequence, fork.parent) == (1, 0)
    assert [e.parent for e in events(scheduler, EventKind.SAMPLED)[-3:]] == [None, 0, None]


def test_a_search_gives_everything_back():
    scheduler, _ = started()
    finish(scheduler)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


def test_an_aborted_search_gives_everything_back():
    scheduler, _ = started()
    step(scheduler)
    scheduler.abort("b")
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


# stepping together


def test_beams_wait_for_a_step_with_room_for_all_and_others_run_meanwhile():
    scheduler = make_scheduler(max_num_batched_tokens=3)
    scheduler.add(make_request("other", 3, max_tokens=3))
    step(scheduler)
    scheduler.add(beam_request(prompt=2))
    assert shares(step(scheduler)) == {"other": 1, "b": 2}
    assert shares(step(scheduler)) == {"other": 1}
    assert shares(step(scheduler)) == {"b": 3}


def test_beams_never_run_in_part():
    scheduler = make_scheduler(max_num_batched_tokens=6, long_prefill_threshold=4)
    scheduler.add(make_request("first", 14))
    scheduler.add(beam_request(prompt=2))
    assert [shares(step(scheduler)) for _ in range(4)] == [
        {"first": 4, "b": 2},
        {"first": 4},
        {"first": 4},
        {"first": 2, "b": 3},
    ]


@pytest.mark.parametrize(
    ("setting", "words"), [("max_num_batched_tokens", "step together"), ("max_num_seqs", "at most")]
)
def test_a_width_that_no_step_has_room_for_is_refused(setting, words):
    scheduler = make_scheduler(**{setting: 2})
    with pytest.raises(RequestError, match=f"width=3: .*{words}.*{setting}=2"):
        scheduler.add(beam_request())


# preemption


def preempted():
    """A long request and a search; the pool ran full when the beams had drawn some tokens."""
    scheduler = make_scheduler(num_blocks=9, max_model_len=32, enable_prefix_caching=False)
    scheduler.add(make_request("first", 14, max_tokens=12))
    request = beam_request(width=2, max_tokens=9)
    scheduler.add(request)
    while not scheduler.num_preemptions:
        step(scheduler)
    return scheduler, request


def test_a_search_is_preempted_whole():
    scheduler, request = preempted()
    assert request.status is Status.PREEMPTED
    assert all(s.uid not in scheduler.kv.tables and s.num_computed == 0 for s in request.sequences)


def test_it_computes_its_prompt_once_forks_again_catches_up_and_then_draws_together():
    scheduler, request = preempted()
    drawn = len(request.sequences[0].output_token_ids)
    assert drawn > 1
    while request.status is not Status.RUNNING:
        plan = step(scheduler)
    assert (shares(plan)["b"], plan.rows[-1].samples) == (6, ())
    catch_up, draw = step(scheduler), step(scheduler)
    mine = [[r for r in plan.rows if r.sequence.request is request] for plan in (catch_up, draw)]
    assert [[(r.num_tokens, len(r.samples)) for r in rows] for rows in mine] == [[(drawn - 1, 0)] * 2, [(1, 1)] * 2]


# copies in flight


def test_both_ends_of_a_copy_have_a_reference_more_until_the_step_has_completed():
    scheduler, _ = started(width=2)
    plan = scheduler.schedule()
    assert plan.copies == [(2, 3)]
    assert [scheduler.kv.pool.blocks[i].ref_count for i in (2, 3)] == [2, 2]
    scheduler.integrity()
    scheduler.update(plan, draw_from(plan))
    assert [scheduler.kv.pool.blocks[i].ref_count for i in (2, 3)] == [1, 1]


def test_an_abort_while_a_copy_runs_frees_its_ends_only_when_it_is_done():
    scheduler, _ = started(width=2)
    plan = scheduler.schedule()
    scheduler.abort("b")
    scheduler.integrity()
    assert not {2, 3} & {block.id for block in scheduler.kv.pool.free_list}
    scheduler.update(plan, draw_from(plan))
    scheduler.integrity()
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


def test_a_preempted_row_takes_its_copies_along():
    scheduler = make_scheduler(num_blocks=6, max_model_len=16, policy="priority")
    scheduler.add(beam_request(width=2, prompt=5, priority=1))
    step(scheduler)
    scheduler.add(make_request("high", 8, priority=0))
    scheduler.update(plan := scheduler.schedule(), draw_from(plan, None, 0))
    plan = scheduler.schedule()
    assert [e.request for e in events(scheduler, EventKind.PREEMPTED)] == ["b"]
    assert events(scheduler, EventKind.COPIED)[-1].step == plan.step, "a copy was planned before its row had to go"
    assert plan.copies == []
    assert not scheduler.kv.retained
    scheduler.integrity()

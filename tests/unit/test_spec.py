"""Proposed tokens, in parts: what followed before, what matches, and what the scheduler does with right and wrong ones."""

import pytest

from minivllm.obs.timeline import Activity, build_timeline
from minivllm.plan import EventKind, Row, StepPlan
from minivllm.request import FinishReason, SampledToken
from minivllm.sample.spec import find_continuation, keep_matching
from tests.builders import draw, events, make_request, make_scheduler, shares, step


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
        ([1, 2, 9, 0, 1, 2, 3, 1, 2], [9, 0, 1]),
        ([5, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),
        ([4, 4, 4, 4], [4]),
        ([1, 2, 3, 4], []),
        ([1], []),
        ([], []),
    ],
)
def test_drafts_follow_the_first_occurrence_of_the_longest_run(tokens, found):
    assert find_continuation(tokens, 2, 3, 3) == found


def row_with(*drafts):
    request = make_request("r", 3)
    row = Row(request.sequences[0], 3, 1 + len(drafts), [1, 2], (request.sequences[0],), drafts=drafts)
    return StepPlan(1, [row])


@pytest.mark.parametrize(
    ("drawn", "kept"), [([5, 6, 7], [5, 6, 7]), ([5, 9, 7], [5, 9]), ([9, 6, 7], [9]), ([9, 5, 6], [9])]
)
def test_draws_are_kept_up_to_the_first_that_was_not_drafted(drawn, kept):
    tokens = keep_matching(row_with(5, 6), [[SampledToken(t)] for t in drawn])
    assert [t.token_id for t in tokens[0]] == kept


def test_each_row_of_logits_is_drawn_from_as_if_the_drafts_before_were_true():
    plan = row_with(5, 6)
    (row,) = plan.rows
    assert [group[0].output_token_ids for group in plan.groups] == [[], [5], [5, 6]]
    assert row.sequence.output_token_ids == []
    assert row.token_ids[:2] == [5, 6]


def decoding(max_tokens=8, prompt=3, **config):
    """A scheduler whose one request has its first token."""
    scheduler = make_scheduler(spec_method="ngram", **config)
    request = make_request("r", prompt, max_tokens)
    scheduler.add(request)
    step(scheduler)
    return scheduler, request.sequences[0]


def take(scheduler, plan, *tokens):
    return scheduler.update(plan, [[SampledToken(t) for t in tokens]])


def test_a_step_runs_the_drafts_and_goes_back_by_those_that_were_wrong():
    scheduler, sequence = decoding()
    scheduler.propose(sequence, [5, 6, 7])
    plan = scheduler.schedule()
    assert (shares(plan), plan.rows[0].drafts, sequence.num_computed) == ({"r": 4}, (5, 6, 7), 7)
    take(scheduler, plan, 5, 9)
    assert sequence.output_token_ids == [7, 5, 9]
    assert sequence.num_computed == sequence.num_tokens - 1 == 5
    assert [e.tokens for e in events(scheduler, EventKind.ACCEPTED)] == [1]


def test_drafts_are_for_one_step():
    scheduler, sequence = decoding()
    scheduler.propose(sequence, [5])
    take(scheduler, scheduler.schedule(), 9)
    assert shares(scheduler.schedule()) == {"r": 1}


def test_no_draft_takes_the_place_of_the_last_token():
    scheduler, sequence = decoding(max_tokens=4)
    scheduler.propose(sequence, [1, 2, 3, 4])
    assert sequence.drafts == [1, 2]
    take(scheduler, scheduler.schedule(), 1, 2, 3)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.output_token_ids == [7, 1, 2, 3]


def test_nothing_follows_a_token_that_ends_the_answer():
    scheduler, sequence = decoding(eos=(2,))
    scheduler.propose(sequence, [1, 2, 3])
    appended = take(scheduler, scheduler.schedule(), 1, 2, 3, 4)
    assert [t.token_id for _, t in appended] == [1, 2]
    assert sequence.finish_reason is FinishReason.STOP


def test_only_accepted_tokens_are_published():
    scheduler, sequence = decoding(prompt=3)  # blocks of 4: the first token drawn fills the first
    scheduler.propose(sequence, [5, 6, 7, 8])
    plan = scheduler.schedule()
    assert scheduler.kv.tables[sequence.uid].num_published == 1
    take(scheduler, plan, 5, 6, 7, 8, 9)
    assert scheduler.kv.tables[sequence.uid].num_published == 2


def test_a_budget_cuts_drafts_also_where_prompts_are_not_split():
    for chunked in (True, False):
        scheduler = make_scheduler(
            max_model_len=8, max_num_batched_tokens=8, enable_chunked_prefill=chunked, spec_method="ngram"
        )
        for name in "ab":
            scheduler.add(make_request(name, 2, 6))
        step(scheduler)
        for sequence in scheduler.decoding():
            scheduler.propose(sequence, [1, 2, 3, 4])
        assert shares(scheduler.schedule()) == {"a": 5, "b": 3}


def test_a_preempted_request_forgets_its_drafts():
    scheduler = make_scheduler(num_blocks=5, max_model_len=16, spec_method="ngram")
    for name in "ab":
        scheduler.add(make_request(name, 7, 9))
    step(scheduler)
    for sequence in scheduler.decoding():
        scheduler.propose(sequence, [1, 2, 3])
    plan = scheduler.schedule()
    assert [e.request for e in events(scheduler, EventKind.PREEMPTED)] == ["b"]
    scheduler.update(plan, draw(plan))
    while scheduler.has_requests:
        step(scheduler)
    assert not scheduler.kv.tables


def test_answers_of_one_prompt_have_drafts_of_their_own():
    scheduler = make_scheduler(spec_method="ngram")
    scheduler.add(make_request("r", 6, 8, n=2))
    step(scheduler)
    one, two = scheduler.decoding()
    scheduler.propose(one, [5])
    plan = scheduler.schedule()
    scheduler.update(plan, [[SampledToken(5), SampledToken(6)], [SampledToken(8)]])
    assert (one.output_token_ids, two.output_token_ids) == ([7, 5, 6], [7, 8])
    scheduler.integrity()


def test_what_runs_in_place_of_wrong_drafts_is_drawn_as_decoding():
    scheduler, sequence = decoding()
    for _ in range(2):
        scheduler.propose(sequence, [5, 6])
        take(scheduler, scheduler.schedule(), 5, 9)
    (lane,) = build_timeline(scheduler.recorder.events).lanes
    assert [cell.activity for cell in lane.cells.values()] == [Activity.PREFILL, Activity.DECODE, Activity.DECODE]


def test_drafts_of_a_request_that_left_meanwhile_count_for_nothing():
    scheduler, sequence = decoding()
    scheduler.propose(sequence, [5, 6])
    plan = scheduler.schedule()
    scheduler.abort("r")
    assert take(scheduler, plan, 5, 6, 7) == []
    assert not scheduler.num_drafts
    assert not events(scheduler, EventKind.ACCEPTED)

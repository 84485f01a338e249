"""Requests that wait for a grammar: passed by, and back in their place once it is there."""

import pytest

from minivllm.plan import EventKind
from minivllm.request import GuidedJson, Status
from tests.builders import events, finish, ids, make_request, make_scheduler, shares, step

GUIDED = GuidedJson()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_those_that_wait_for_a_grammar_are_passed_and_keep_their_place(policy):
    scheduler = make_scheduler(policy=policy, max_num_seqs=1)
    for name, guided in (("a", GUIDED), ("b", GUIDED), ("c", None), ("d", None)):
        scheduler.add(make_request(name, 4, max_tokens=1, guided=guided))
    assert shares(step(scheduler)) == {"c": 4}
    assert ids(scheduler.waiting) == ["a", "b", "d"]
    scheduler.grammar_compiled("b")
    assert [shares(step(scheduler)) for _ in range(2)] == [{"b": 4}, {"d": 4}]
    assert not scheduler.schedule().rows
    scheduler.grammar_compiled("a")
    assert shares(step(scheduler)) == {"a": 4}
    assert not scheduler.has_requests


def test_a_waiting_request_is_counted_and_holds_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, guided=GUIDED))
    assert scheduler.requests["a"].status is Status.WAITING_FOR_GRAMMAR
    for _ in range(3):
        assert not scheduler.schedule().rows
    scheduler.integrity()
    scheduler.abort("a")
    assert not scheduler.has_requests
    assert len(scheduler.waiting) == 0


def test_a_request_that_does_not_fit_blocks_those_behind_it_but_not_the_order():
    scheduler = make_scheduler(num_blocks=9, max_model_len=32)
    scheduler.add(make_request("waits", 4, guided=GUIDED))
    scheduler.add(make_request("first", 16, max_tokens=2))
    scheduler.add(make_request("big", 28, max_tokens=2))
    step(scheduler)
    assert ids(scheduler.running) == ["first"]
    assert ids(scheduler.waiting) == ["waits", "big"]
    scheduler.grammar_compiled("waits")
    finish(scheduler)
    assert [event.request for event in events(scheduler, EventKind.FINISHED)] == ["first", "waits", "big"]

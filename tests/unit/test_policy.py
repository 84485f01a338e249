"""Queues and victims."""

import pytest

from minivllm.sched.policy import FcfsQueue, PriorityQueue, make_queue, pick_victim
from tests.builders import ids, make_request

uids = iter(range(10**9))


def request(id, priority=0, arrival_time=0.0):
    made = make_request(id, 1, priority=priority, arrival_time=arrival_time)
    made.sequences[0].uid = next(uids)
    return made


def filled(queue, *requests):
    for r in requests:
        queue.push(r)
    return queue


def popped(queue):
    return [queue.pop().id for _ in range(len(queue))]


def test_first_come_first_served():
    assert popped(filled(FcfsQueue(), request("a"), request("b", priority=-5))) == ["a", "b"]


def test_who_was_preempted_goes_before_all_who_wait():
    queue = filled(FcfsQueue(), request("new"))
    queue.push_back(request("later victim"))
    queue.push_back(request("earlier victim"))
    assert popped(queue) == ["earlier victim", "later victim", "new"]


def test_the_smaller_priority_goes_first_then_the_earlier_arrival_then_the_earlier_added():
    queue = filled(
        PriorityQueue(),
        request("late", 1, 2.0),
        request("early", 1, 1.0),
        request("early too", 1, 1.0),
        request("urgent", 0, 3.0),
    )
    assert ids(queue) == ["urgent", "early", "early too", "late"]
    assert popped(queue) == ["urgent", "early", "early too", "late"]


def test_under_priority_a_preempted_request_takes_its_rank_again():
    queue = filled(PriorityQueue(), request("urgent", 0))
    queue.push_back(request("victim", 1))
    assert queue.peek().id == "urgent"


@pytest.mark.parametrize("make", [FcfsQueue, PriorityQueue])
def test_anybody_can_leave_a_queue(make):
    members = [request(name) for name in "abcde"]
    queue = filled(make(), *members)
    queue.remove(members[0])
    queue.remove(members[3])
    assert ids(queue) == popped(queue) == ["b", "c", "e"]


@pytest.mark.parametrize(("policy", "queue"), [("fcfs", FcfsQueue), ("static", FcfsQueue), ("priority", PriorityQueue)])
def test_each_policy_has_its_queue(policy, queue):
    assert isinstance(make_queue(policy), queue)


@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_the_victim_is_the_last_admitted(policy):
    running = [request("a", 0), request("b", 9), request("c", 1)]
    assert pick_victim(running, policy).id == "c"


def test_under_priority_the_victim_is_the_least_important_and_of_these_the_latest():
    running = [request("late", 9, 2.0), request("early", 9, 1.0), request("urgent", 0, 3.0)]
    assert pick_victim(running, "priority").id == "late"

"""The simulated device: what planning ahead gains."""

from itertools import pairwise

import pytest

from minivllm.fleet.overlap import Span, StepCost, simulate, steps_per_unit


def period(device, host, depth):
    """Time between the ends of two steps on the device, once it goes steadily."""
    ends = [s.end for s in simulate([StepCost(device, host * 0.6, host * 0.4)] * 30, depth) if s.where == "device"]
    return ends[-2] - ends[-3]


@pytest.mark.parametrize(
    ("device", "host", "one_by_one", "ahead"), [(8, 3, 11, 8), (20, 3, 23, 20), (5.4, 2, 7.4, 5.4), (2, 5, 7, 5)]
)
def test_a_step_takes_the_sum_or_the_larger(device, host, one_by_one, ahead):
    for depth, expected in ((0, one_by_one), (1, ahead)):
        assert period(device, host, depth) == pytest.approx(expected)
        assert 1 / steps_per_unit(device, host, depth) == pytest.approx(expected)


def test_more_depth_gains_nothing_while_costs_stay_the_same():
    assert period(8, 3, 4) == pytest.approx(period(8, 3, 1))


def test_the_order_of_things():
    assert simulate([StepCost(8, 2, 1)] * 2, 0) == [
        Span("plan", 0, 0, 2),
        Span("device", 0, 2, 10),
        Span("take in", 0, 10, 11),
        Span("plan", 1, 11, 13),
        Span("device", 1, 13, 21),
        Span("take in", 1, 21, 22),
    ]
    assert simulate([StepCost(8, 2, 1)] * 2, 1) == [
        Span("plan", 0, 0, 2),
        Span("device", 0, 2, 10),
        Span("plan", 1, 2, 4),
        Span("device", 1, 10, 18),
        Span("take in", 0, 10, 11),
        Span("take in", 1, 18, 19),
    ]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_host_and_device_do_one_thing_at_a_time_and_nothing_before_its_cause(depth):
    spans = simulate([StepCost(1 + i % 3, 2 - i % 2, 0.5) for i in range(20)], depth)
    for here in ({"device"}, {"plan", "take in"}):
        mine = [s for s in spans if s.where in here]
        assert all(a.end <= b.start for a, b in pairwise(mine))
    at = {(s.where, s.step): s for s in spans}
    for step in range(20):
        assert at["plan", step].end <= at["device", step].start
        assert at["device", step].end <= at["take in", step].start

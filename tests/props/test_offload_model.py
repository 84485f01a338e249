"""Any requests, host memory of any size: every load brings the KV of the right tokens, at the right positions."""

import pytest

from minivllm.plan import EventKind
from tests.lattice import of
from tests.walks import walk_offload


@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("seed", range(25))
def test_a_long_run_with_host_memory_keeps_every_rule_and_replays(seed, async_depth):
    walk_offload(seed, async_depth=async_depth).check_replay()


@pytest.mark.parametrize("async_depth", [0, 1])
def test_the_long_runs_meet_everything_that_can_happen(async_depth):
    walks = [walk_offload(seed, async_depth=async_depth) for seed in range(25)]
    events = [event for walk in walks for event in walk.scheduler.recorder.events]
    assert of(events, EventKind.STORED)
    assert of(events, EventKind.LOADED)
    assert {event.reason.split(":")[0] for event in of(events, EventKind.PREEMPTED)} == {"", "swap", "recompute"}
    assert any(
        event.tokens % walk.config.block_size
        for walk in walks
        for event in of(walk.scheduler.recorder.events, EventKind.LOADED)
    )

"""Any requests, any switches, any order of events: every step is checked against the physical slots and the rules."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minivllm.plan import EventKind
from tests.checked_scheduler import CheckedScheduler
from tests.strategies import EOS, engines, requests, tokens
from tests.walks import walk_scheduler


class SchedulerMachine(RuleBasedStateMachine):
    """Users come and go between steps, and while a step runs."""

    @initialize(engine=engines())
    def start(self, engine):
        config, num_blocks, self.max_model_len = engine
        self.checked = CheckedScheduler(config, num_blocks, self.max_model_len, (EOS,))

    @rule(data=st.data(), number=st.integers(1, 3))
    def add(self, data, number):
        for _ in range(number):
            name = f"r{len(self.checked.requests)}"
            self.checked.add(data.draw(requests(name, self.max_model_len)))

    @rule(drawn=st.lists(tokens, min_size=1, max_size=12), stops=st.sampled_from([(), (), (), (), (0,), (1,)]))
    def step(self, drawn, stops):
        """A step for every token drawn; siblings draw different ones."""
        for i in range(len(drawn)):
            self.checked.step(lambda s, i=i: drawn[(i + s.index) % len(drawn)], at_stop_string=stops)

    def unfinished(self):
        return [r for r in self.checked.requests if not r.finished]

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data(), while_a_step_runs=st.booleans())
    def abort(self, data, while_a_step_runs):
        request = data.draw(st.sampled_from(self.unfinished()))
        if while_a_step_runs:
            self.checked.step(lambda _: 1, leaving=[request])
        else:
            self.checked.abort(request)

    def teardown(self):
        if hasattr(self, "checked"):
            self.checked.drain(lambda s: 1 + len(s.output_token_ids) % 2)
            self.checked.check_replay()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=12)


@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("seed", range(25))
def test_a_long_run_in_a_tight_pool_keeps_every_rule_and_replays(seed, async_depth):
    walk_scheduler(seed, async_depth=async_depth).check_replay()


def test_the_long_runs_meet_everything_that_can_happen():
    walks = [walk_scheduler(seed, async_depth=seed % 2) for seed in range(25)]
    seen = {event.kind for walk in walks for event in walk.scheduler.recorder.events}
    elsewhere = {EventKind.ABORTED, EventKind.COMPILED, EventKind.STOPPED, EventKind.PROPOSED, EventKind.ACCEPTED}
    assert seen == set(EventKind) - elsewhere

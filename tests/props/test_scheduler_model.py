"""Any requests, any switches, any order of events: every step is checked against the physical slots and the rules."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.checked_scheduler import CheckedScheduler
from tests.strategies import EOS, engines, requests, tokens


class SchedulerMachine(RuleBasedStateMachine):
    """Users come and go between steps, and while a step runs."""

    @initialize(engine=engines())
    def start(self, engine):
        config, num_blocks, self.max_model_len = engine
        self.checked = CheckedScheduler(config, num_blocks, self.max_model_len, (EOS,))

    @rule(data=st.data())
    def add(self, data):
        name = f"r{len(self.checked.requests)}"
        self.checked.add(data.draw(requests(name, self.max_model_len)))

    @rule(data=st.data(), stops=st.sampled_from([(), (), (), (0,), (1,)]))
    def step(self, data, stops):
        self.checked.step(lambda _: data.draw(tokens), at_stop_string=stops)

    def unfinished(self):
        return [r for r in self.checked.requests if not r.finished]

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def abort(self, data):
        self.checked.abort(data.draw(st.sampled_from(self.unfinished())))

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def leave_while_the_step_runs(self, data):
        leaving = data.draw(st.sampled_from(self.unfinished()))
        self.checked.step(lambda _: data.draw(tokens), leaving=[leaving])

    def teardown(self):
        if hasattr(self, "checked"):
            self.checked.drain(lambda s: 1 + len(s.output_token_ids) % 2)
            self.checked.check_replay()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(settings.get_profile(settings._current_profile), stateful_step_count=40)

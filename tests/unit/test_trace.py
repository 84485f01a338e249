"""The trace: what is written can be read back, and leads to the same decisions."""

import pytest

from minivllm.config import EngineConfig
from minivllm.plan import EventKind, TraceEvent
from minivllm.request import SampledToken
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import (
    Recorder,
    TraceError,
    TraceHeader,
    dump_event,
    load_event,
    read_trace,
    replay,
    spec_of,
)
from tests.builders import finish, make_request, make_scheduler, step

HEADER = TraceHeader(EngineConfig(block_size=4), 9, 32, (2,))


def record(path=None, header=HEADER):
    """A scheduler whose events go to a file, if there is one."""
    recorder = Recorder(keep=None)
    if path is not None:
        recorder.write_to(path, header)
    return Scheduler(header.config, header.num_blocks, header.max_model_len, header.eos_token_ids, recorder)


def busy(scheduler):
    """Preemption, forks, hits, an abort and a stop string."""
    scheduler.add(make_request("a", list(range(14)), max_tokens=12, salt="\ud800"))
    scheduler.add(make_request("b", list(range(6)), n=2, max_tokens=9, ignore_eos=True))
    step(scheduler)
    scheduler.add(make_request("c", list(range(6)), stop_token_ids=(7,), prompt_logprobs=0))
    for _ in range(4):
        step(scheduler)
    scheduler.stop(scheduler.requests["a"].sequences[0], "###")
    scheduler.add(make_request("d", 3, priority=3, arrival_time=0.1))
    step(scheduler)
    scheduler.abort("d")
    finish(scheduler)
    scheduler.recorder.close()
    return list(scheduler.recorder.events)


def test_events_carry_the_step_in_which_they_happened():
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 3, max_tokens=2))
    finish(scheduler)
    assert [e.step for e in scheduler.recorder.events if e.kind is EventKind.SCHEDULED] == [1, 2]
    assert scheduler.recorder.events[0].step == 0


def test_a_recorder_keeps_the_latest_events():
    recorder = Recorder(keep=2)
    for name in "abc":
        recorder.emit(EventKind.ABORTED, request=name)
    assert [event.request for event in recorder.events] == ["b", "c"]


def test_an_event_is_one_line_without_its_defaults():
    assert dump_event(TraceEvent(3, EventKind.HIT, "r", blocks=(1, 2), tokens=8)) == (
        '{"step":3,"kind":"hit","request":"r","blocks":[1,2],"tokens":8}'
    )


def test_an_event_reads_back_as_it_was():
    spec = spec_of(make_request("r", 3, n=2, stop_token_ids=(4, 5), prompt_logprobs=1))
    event = TraceEvent(0, EventKind.ADDED, "r", token_ids=(1, 2, 3), spec=spec)
    assert load_event(dump_event(event)) == event


def test_a_file_reads_back_header_and_events(tmp_path):
    path = tmp_path / "trace.jsonl"
    events = busy(record(path))
    assert read_trace(path) == (HEADER, events)


def test_a_trace_replays_without_a_model(tmp_path):
    path = tmp_path / "trace.jsonl"
    scheduler = record(path)
    events = busy(scheduler)
    assert {EventKind.PREEMPTED, EventKind.FORKED, EventKind.HIT, EventKind.STOPPED} <= {e.kind for e in events}
    steps = [again.recorder.step for again in replay(*read_trace(path))]
    assert steps == list(range(scheduler.recorder.step + 1))


def test_a_replay_shows_the_state_after_each_step():
    scheduler = record()
    scheduler.add(make_request("r", 5, max_tokens=3))
    finish(scheduler)
    usable = scheduler.kv.pool.num_usable
    assert [usable - s.kv.pool.num_free for s in replay(HEADER, list(scheduler.recorder.events))] == [0, 2, 2, 0]


def test_steps_with_nothing_to_do_leave_no_event_and_replay():
    scheduler = record()
    step(scheduler)
    scheduler.add(make_request("r", 3, max_tokens=1))
    step(scheduler)
    step(scheduler)
    step(scheduler)
    scheduler.add(make_request("s", 3, max_tokens=1))
    step(scheduler)
    assert [again.recorder.step for again in replay(HEADER, list(scheduler.recorder.events))] == [1, 2, 4, 5]


def test_an_abort_while_the_step_runs_replays_where_it_came():
    scheduler = record()
    for name in ("gone", "stays"):
        scheduler.add(make_request(name, 3, max_tokens=1))
    plan = scheduler.schedule()
    scheduler.abort("gone")
    scheduler.update(plan, [[SampledToken(5)], [SampledToken(6)]])
    *_, again = replay(HEADER, list(scheduler.recorder.events))
    assert not again.has_requests


def test_a_replay_stops_at_the_first_other_decision():
    scheduler = record()
    scheduler.add(make_request("r", 5, max_tokens=3))
    finish(scheduler)
    other = TraceHeader(EngineConfig(block_size=8), 9, 32, (2,))
    with pytest.raises(TraceError, match="replay differs in step 1"):
        list(replay(other, list(scheduler.recorder.events)))


def test_a_replay_needs_the_parameters_of_a_request():
    with pytest.raises(TraceError, match="r was added without its parameters"):
        list(replay(HEADER, [TraceEvent(0, EventKind.ADDED, "r", token_ids=(1,))]))


def test_a_file_that_can_not_be_written_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"trace_file='.*nowhere/trace'.*can't be written"):
        Recorder().write_to(tmp_path / "nowhere" / "trace", HEADER)


@pytest.mark.parametrize("content", ["", "no json", "[]", '{"a": 1}', '{"config": {"block_sizes": 4}}'])
def test_a_file_that_is_no_trace_is_named_with_its_line(tmp_path, content):
    path = tmp_path / "other"
    path.write_text(content)
    with pytest.raises(TraceError, match="line 1: not a minivllm trace"):
        read_trace(path)


@pytest.mark.parametrize(
    "line", ["{", "[]", '"text"', "{}", '{"step":1,"kind":"eaten"}', '{"step":1,"kind":"hit","x":1}']
)
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    record(path).recorder.close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TraceError, match="line 2: not a minivllm trace"):
        read_trace(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TraceError, match="can't be read"):
        read_trace(tmp_path / "missing")

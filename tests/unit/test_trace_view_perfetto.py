"""The Chrome trace keeps the rules of the trace-event format, and says what the engine did."""

import json

import pytest

from minivllm.cli.perfetto import REQUESTS, STEP_US, chrome_trace
from minivllm.obs.timeline import build_timeline
from minivllm.plan import EventKind
from tests.cli_support import TINY, run_requests

WISHES = [(0, list(range(12)), 1, 10), (0, list(range(50, 61)), 1, 10), (3, list(range(12)), 2, 3)]


@pytest.fixture(scope="module")
def run():
    return run_requests(TINY, 8, WISHES)


@pytest.fixture(scope="module")
def document(run):
    trace = chrome_trace(build_timeline(run.events), run.events, run.states, TINY.max_num_batched_tokens)
    return json.loads(json.dumps(trace))


def phase(document, ph: str) -> list[dict]:
    return [event for event in document["traceEvents"] if event["ph"] == ph]


def test_the_document_is_the_json_object_form(document):
    assert isinstance(document["traceEvents"], list)
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert {event["ph"] for event in document["traceEvents"]} == {"M", "X", "i", "C"}


def test_every_event_has_the_fields_its_phase_requires(document):
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int) for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")


def test_slices_of_a_track_do_not_overlap(document):
    ends: dict[int, int] = {}
    for event in sorted(phase(document, "X"), key=lambda e: e["ts"]):
        assert event["ts"] >= ends.get(event["tid"], 0)
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_every_sequence_has_a_named_track(document):
    names = {e["args"]["name"] for e in phase(document, "M") if e["name"] == "thread_name" and e["pid"] == REQUESTS}
    assert names == {"r0", "r1", "r2", "r2/1"}


def test_a_step_is_a_millisecond_and_the_metadata_says_so(document, run):
    assert "1 ms" in document["otherData"]["time"]
    assert max(e["ts"] + e["dur"] for e in phase(document, "X")) == run.scheduler.recorder.step * STEP_US


def test_slices_hold_every_token_that_was_scheduled(document, run):
    scheduled = sum(e.tokens for e in run.events if e.kind is EventKind.SCHEDULED)
    assert sum(e["args"]["tokens"] for e in phase(document, "X")) == scheduled


@pytest.mark.parametrize("kind", [EventKind.PREEMPTED, EventKind.HIT, EventKind.EVICTED])
def test_preemptions_hits_and_evictions_are_instants(document, run, kind):
    expected = sum(e.kind is kind for e in run.events)
    assert expected > 0
    assert sum(e["name"] == kind for e in phase(document, "i")) == expected


def test_counters_follow_the_pool_and_the_budget(document, run):
    last = run.scheduler.recorder.step
    blocks = [e["args"] for e in phase(document, "C") if e["name"] == "KV blocks"]
    budget = [e["args"] for e in phase(document, "C") if e["name"] == "token budget"]
    assert len(blocks) == len(budget) == last
    assert {sum(values.values()) for values in blocks} == {run.scheduler.kv.pool.num_usable}
    assert {sum(values.values()) for values in budget} == {TINY.max_num_batched_tokens}


def test_without_states_the_pool_counters_are_left_out(run):
    trace = chrome_trace(build_timeline(run.events), run.events, {}, 8)
    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "C"} == {"token budget"}

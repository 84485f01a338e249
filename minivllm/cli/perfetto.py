"""A trace as a Chrome trace: JSON that https://ui.perfetto.dev and chrome://tracing open.

Source of the format: "Trace Event Format" (Google, JSON object form). Used of it: complete slices (X), instants (i),
counters (C) and metadata (M). Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from minivllm.cli.cache_view import State
from minivllm.obs.timeline import Activity, Lane, Timeline
from minivllm.plan import EventKind, TraceEvent

Json = dict[str, object]

STEP_US = 1000
REQUESTS, ENGINE = 1, 2  # process ids: one group of tracks each
INSTANTS = (
    EventKind.HIT,
    EventKind.PREEMPTED,
    EventKind.COPIED,
    EventKind.FORKED,
    EventKind.STOPPED,
    EventKind.ABORTED,
    EventKind.DROPPED,
    EventKind.LOADED,
)
POOL_INSTANTS = (EventKind.EVICTED, EventKind.WITHDRAWN, EventKind.STORED)
COLOURS = {
    Activity.PREFILL: "thread_state_runnable",
    Activity.RECOMPUTE: "terrible",
    Activity.DECODE: "good",
    Activity.WAITING: "grey",
}


def chrome_trace(timeline: Timeline, events: Iterable[TraceEvent], states: Mapping[int, State], budget: int) -> Json:
    """The whole trace. One track a sequence with a slice a step, instants for hits, preemptions, copies and evictions,
    counters for KV blocks, tokens run and budget, and requests running and waiting. `states` may be empty.

    The engine's trace holds no wall time: step s lasts from (s - 1) to s milliseconds here, and the metadata says so.
    """
    tracks = {(lane.request, lane.index): tid for tid, lane in enumerate(timeline.lanes, 1)}
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": "minivllm",
            "time": "not wall time: one engine step is drawn as 1 ms",
            "max_num_batched_tokens": budget,
        },
        "traceEvents": [
            *_names(timeline.lanes),
            *(slice_ for tid, lane in enumerate(timeline.lanes, 1) for slice_ in _slices(lane, tid)),
            *_instants(events, tracks),
            *_counters(timeline, states, budget),
        ],
    }


def _event(phase: str, name: str, pid: int, tid: int, step: int, args: Json, **more: object) -> Json:
    """One event; `step` is when it begins."""
    start = max(step - 1, 0) * STEP_US
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": start, "args": args, **more}


def _names(lanes: list[Lane]) -> Iterator[Json]:
    for pid, name in ((REQUESTS, "requests"), (ENGINE, "engine")):
        yield _event("M", "process_name", pid, 0, 0, {"name": name})
    yield _event("M", "thread_name", ENGINE, 1, 0, {"name": "block pool"})
    for tid, lane in enumerate(lanes, 1):
        yield _event("M", "thread_name", REQUESTS, tid, 0, {"name": lane.name})
        yield _event("M", "thread_sort_index", REQUESTS, tid, 0, {"sort_index": tid})


def _slices(lane: Lane, tid: int) -> Iterator[Json]:
    for step, cell in sorted(lane.cells.items()):
        if cell.activity is Activity.PREEMPTED:
            continue  # drawn as an instant: nothing ran
        args: Json = {"step": step, "tokens": cell.tokens}
        if cell.cached:
            args["cached_tokens"] = cell.cached
        if cell.finished:
            args["finished"] = cell.finished
        name = f"{cell.activity} {cell.tokens}" if cell.tokens else str(cell.activity)
        colour = COLOURS[cell.activity]
        yield _event("X", name, REQUESTS, tid, step, args, cat=str(cell.activity), cname=colour, dur=STEP_US)


def _instants(events: Iterable[TraceEvent], tracks: Mapping[tuple[str, int], int]) -> Iterator[Json]:
    for event in events:
        if event.kind in INSTANTS:
            pid, tid = REQUESTS, tracks.get((event.request, event.sequence), 0)
        elif event.kind in POOL_INSTANTS:
            pid, tid = ENGINE, 1
        else:
            continue
        args: Json = {"step": event.step, "blocks": list(event.blocks)}
        if event.tokens:
            args["tokens"] = event.tokens
        yield _event("i", str(event.kind), pid, tid, event.step, args, cat="decision", s="t")


def _counters(timeline: Timeline, states: Mapping[int, State], budget: int) -> Iterator[Json]:
    for step in range(timeline.first, timeline.last + 1):
        ran = timeline.tokens(step)
        yield _event("C", "token budget", ENGINE, 0, step, {"used": ran, "left": max(budget - ran, 0)})
        if state := states.get(step):
            blocks: Json = {"held": state.held, "cached": state.cached, "free": state.free}
            yield _event("C", "KV blocks", ENGINE, 0, step, blocks)
            yield _event("C", "requests", ENGINE, 0, step, {"running": state.running, "waiting": state.waiting})

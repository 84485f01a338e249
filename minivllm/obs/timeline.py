"""What a trace says, put in a grid: one lane a sequence, one cell a step. No drawing here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from minivllm.plan import EventKind, TraceEvent


def sequence_name(request: str, index: int) -> str:
    """The request's id; its further sequences (n > 1) get their number behind it."""
    return f"{request}/{index}" if index else request


class Activity(StrEnum):
    """What a sequence did in a step."""

    PREFILL = "prefill"  # prompt tokens run for the first time
    RECOMPUTE = "recompute"  # tokens run again after a preemption
    DECODE = "decode"
    PREEMPTED = "preempted"
    WAITING = "waiting"


@dataclass(slots=True)
class Cell:
    """One sequence in one step: tokens run from position `start` on, prompt tokens found in the cache, why it ended if it did."""

    activity: Activity
    start: int = 0
    tokens: int = 0
    cached: int = 0
    finished: str = ""


@dataclass(slots=True)
class Lane:
    """One sequence through time. `num_prompt` is None when the trace starts after the request was added."""

    request: str
    index: int
    num_prompt: int | None
    cells: dict[int, Cell] = field(default_factory=dict)
    num_drawn: int = 0
    finished: str = ""
    reached: int = 0

    @property
    def name(self) -> str:
        return sequence_name(self.request, self.index)

    def run(self, event: TraceEvent) -> Cell:
        """Note that a step runs some of the sequence's tokens."""
        stop = event.start + event.tokens
        if event.start < self.reached:
            activity = Activity.RECOMPUTE
        elif event.tokens == 1 if self.num_prompt is None else event.start >= self.num_prompt:
            activity = Activity.DECODE
        else:
            activity = Activity.PREFILL
        self.reached = max(self.reached, stop)
        return self.cells.setdefault(event.step, Cell(activity, event.start, event.tokens))


@dataclass(slots=True)
class Timeline:
    """Lanes in order of arrival, over the steps `first` .. `last` (both run)."""

    lanes: list[Lane]
    first: int
    last: int

    def active(self, first: int, last: int) -> list[Lane]:
        """The lanes that have something to show in steps `first` .. `last`."""
        return [lane for lane in self.lanes if any(first <= step <= last for step in lane.cells)]

    def tokens(self, step: int) -> int:
        """How many tokens a step ran."""
        return sum(lane.cells[step].tokens for lane in self.lanes if step in lane.cells)


class TimelineBuilder:
    """Turns events, in order, into a `Timeline`."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._prompts: dict[str, int] = {}
        self._waiting: set[str] = set()
        self._cached: dict[str, int] = {}

    def add_step(self, step: int, events: list[TraceEvent]) -> None:
        """Take in all events of one step. Requests that wait get a cell for it too."""
        for event in events:
            handle = getattr(self, f"_{event.kind}", None)
            if handle is not None:
                handle(event)
        for lane in self._lanes.values() if step else ():
            if lane.request in self._waiting and not lane.finished:
                lane.cells.setdefault(step, Cell(Activity.WAITING))
        # what was added after the step ran waits from the next one on
        self._waiting |= {event.request for event in events if event.kind is EventKind.ADDED}

    def lanes(self) -> list[Lane]:
        return list(self._lanes.values())

    def _lane(self, request: str, index: int) -> Lane:
        key = request, index
        if key not in self._lanes:
            self._lanes[key] = Lane(request, index, self._prompts.get(request))
        return self._lanes[key]

    def _added(self, event: TraceEvent) -> None:
        self._prompts[event.request] = len(event.token_ids)
        self._lane(event.request, 0)

    def _hit(self, event: TraceEvent) -> None:
        self._cached[event.request] = event.tokens

    def _scheduled(self, event: TraceEvent) -> None:
        self._waiting.discard(event.request)
        cell = self._lane(event.request, event.sequence).run(event)
        cell.cached = self._cached.pop(event.request, 0)

    def _preempted(self, event: TraceEvent) -> None:
        self._waiting.add(event.request)
        for lane in self._lanes.values():
            if lane.request == event.request and not lane.finished:
                lane.cells[event.step] = Cell(Activity.PREEMPTED)

    def _sampled(self, event: TraceEvent) -> None:
        self._lane(event.request, event.sequence).num_drawn += 1

    def _accepted(self, event: TraceEvent) -> None:
        lane = self._lane(event.request, event.sequence)
        lane.reached = event.start + 1 + event.tokens  # what runs in place of wrong drafts isn't run again

    def _finished(self, event: TraceEvent) -> None:
        self._waiting.discard(event.request)
        lane = self._lane(event.request, event.sequence)
        lane.finished = event.reason
        lane.cells.setdefault(event.step, Cell(Activity.WAITING)).finished = event.reason


def by_step(events: Iterable[TraceEvent]) -> Iterator[tuple[int, list[TraceEvent]]]:
    """Events grouped by the step they belong to; step 0 is what came before the first."""
    for step, group in groupby(events, key=lambda event: event.step):
        yield step, list(group)


def build_timeline(events: Iterable[TraceEvent]) -> Timeline:
    """The grid of a whole trace, or of the end of one."""
    builder, steps = TimelineBuilder(), []
    for step, group in by_step(events):
        builder.add_step(step, group)
        steps.append(step)
    first = max(steps[0], 1) if steps else 1
    return Timeline(builder.lanes(), first, steps[-1] if steps else 0)

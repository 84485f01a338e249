"""The trace: every decision of the engine as an event, written as JSON lines, replayed without a model."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import groupby, takewhile, zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING

from minivllm.config import EngineConfig, MinivllmError
from minivllm.kv.hybrid import ONE_GROUP, Windows
from minivllm.plan import EventKind, RequestSpec, TraceEvent
from minivllm.request import BeamParams, GuidedJson, Request, SampledToken, SamplingParams
from minivllm.sched.async_sched import is_stale

if TYPE_CHECKING:
    from minivllm.sched.scheduler import Scheduler

KEEP_EVENTS = 10_000


class TraceError(MinivllmError):
    """A trace file can't be read, or a replay came to other decisions than it recorded."""


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a replay starts from: the first line of a trace file."""

    config: EngineConfig
    num_blocks: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    windows: Windows = ONE_GROUP


class Recorder:
    """Numbers events by step and keeps the latest; with a file, writes each as one JSON line."""

    def __init__(self, keep: int | None = KEEP_EVENTS) -> None:
        self.step = 0
        self.events: deque[TraceEvent] = deque(maxlen=keep)
        self._file: IO[str] | None = None

    def emit(self, kind: EventKind, **details: object) -> None:
        event = TraceEvent(self.step, kind, **details)  # type: ignore[arg-type]
        self.events.append(event)
        if self._file is not None:
            self._file.write(dump_event(event) + "\n")

    def write_to(self, path: str | Path, header: TraceHeader) -> None:
        """Start a trace file; raises `TraceError` if it can't be written."""
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - open until close()
        except OSError as error:
            raise TraceError(f"trace_file={str(path)!r}: can't be written ({error.strerror})") from error
        self._file.write(json.dumps({"minivllm_trace": 1, **asdict(header)}) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def spec_of(request: Request) -> RequestSpec:
    """The part of a request that decides how it is scheduled."""
    params = request.params
    return RequestSpec(
        n=params.n,
        max_tokens=request.max_tokens,
        priority=request.priority,
        arrival_time=request.arrival_time,
        cache_salt=request.cache_salt,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        reads_cache=params.prompt_logprobs is None,
        beams=request.beams is not None,
        guided=params.guided is not None,
    )


def dump_event(event: TraceEvent) -> str:
    """One JSON object with the fields that differ from their defaults."""
    values = {f.name: getattr(event, f.name) for f in fields(event)}
    shown = {f.name: values[f.name] for f in fields(event) if values[f.name] != f.default}
    if event.spec is not None:
        shown["spec"] = asdict(event.spec)
    return json.dumps(shown, separators=(",", ":"))


def load_event(line: str) -> TraceEvent:
    values = json.loads(line)
    spec = values.pop("spec", None)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    values["kind"] = EventKind(values["kind"])
    if spec is not None:
        spec["stop_token_ids"] = tuple(spec["stop_token_ids"])
        values["spec"] = RequestSpec(**spec)
    return TraceEvent(**values)


def read_trace(path: str | Path) -> tuple[TraceHeader, list[TraceEvent]]:
    """Header and events of a trace file; raises `TraceError` naming file and line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"trace {str(path)!r} can't be read: {error}") from error
    number = 1
    try:
        head = json.loads(lines[0])
        eos, windows = tuple(head["eos_token_ids"]), tuple(head["windows"])
        header = TraceHeader(EngineConfig(**head["config"]), head["num_blocks"], head["max_model_len"], eos, windows)
        events = []
        for number, line in enumerate(lines[1:], 2):  # noqa: B007
            events.append(load_event(line))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"trace {str(path)!r}, line {number}: not a minivllm trace ({error})") from error
    return header, events


def replay(header: TraceHeader, events: Iterable[TraceEvent]) -> Iterator[Scheduler]:
    """Run the scheduler again on a trace's inputs alone, without a model; yields it after each step (and before the first).

    Raises `TraceError` at the first event that differs from the recorded one. Needs all events from step 0 on.
    """
    from minivllm.sched.scheduler import Scheduler

    recorder = Recorder(keep=None)
    scheduler = Scheduler(
        header.config, header.num_blocks, header.max_model_len, header.eos_token_ids, recorder, header.windows
    )
    for step, recorded in _by_step(events):
        recorder.events.clear()
        if step:
            recorder.step = step - 1  # steps that had nothing to decide left no event
            scheduler.schedule()
        _feed(scheduler, recorded)
        _compare(step, recorded, list(recorder.events))
        yield scheduler


NO_TOKEN = SampledToken(-1)


def _by_step(events: Iterable[TraceEvent]) -> Iterator[tuple[int, list[TraceEvent]]]:
    for step, group in groupby(events, key=lambda event: event.step):
        yield step, list(group)


def _update(scheduler: Scheduler, step: int, following: Iterable[TraceEvent]) -> None:
    """Complete a step with the tokens recorded after it: one for each of a row's samples, several for one with drafts."""
    tokens: dict[tuple[str, int], list[SampledToken]] = defaultdict(list)
    for event in takewhile(lambda event: event.kind is not EventKind.COMPLETED, following):
        if event.kind is EventKind.SAMPLED:
            tokens[event.request, event.sequence].append(SampledToken(event.token_ids[0], parent=event.parent))
    plan = scheduler.in_flight.plans[step]
    drawn = [[t for s in row.samples for t in tokens[s.request.id, s.index] or [NO_TOKEN]] for row in plan.rows]
    rows = zip(plan.rows, drawn, strict=True)
    scheduler.update(plan, [[] if is_stale(row) else own for row, own in rows if row.samples])


def _feed(scheduler: Scheduler, recorded: list[TraceEvent]) -> None:
    """Give the scheduler the inputs among the recorded events."""
    for number, event in enumerate(recorded):
        if event.kind is EventKind.ADDED:
            scheduler.add(_request_of(event))
        elif event.kind is EventKind.ABORTED:
            scheduler.abort(event.request)
        elif event.kind is EventKind.COMPILED:
            scheduler.grammar_compiled(event.request)
        elif event.kind is EventKind.COMPLETED and event.start in scheduler.in_flight.plans:
            _update(scheduler, event.start, recorded[number + 1 :])
        elif event.kind is EventKind.PROPOSED and event.request in scheduler.requests:
            scheduler.propose(scheduler.requests[event.request].sequences[event.sequence], [-1] * event.tokens)
        elif event.kind is EventKind.STOPPED and event.request in scheduler.requests:
            scheduler.stop(scheduler.requests[event.request].sequences[event.sequence], event.reason)


def _request_of(event: TraceEvent) -> Request:
    spec = event.spec
    if spec is None:
        raise TraceError(f"trace: request {event.request} was added without its parameters")
    params = SamplingParams(
        n=spec.n,
        stop_token_ids=spec.stop_token_ids,
        ignore_eos=spec.ignore_eos,
        prompt_logprobs=None if spec.reads_cache else 0,
        guided=GuidedJson() if spec.guided else None,  # which guide makes no difference: the tokens are recorded
    )
    return Request(
        event.request,
        list(event.token_ids),
        params,
        max_tokens=spec.max_tokens,
        priority=spec.priority,
        arrival_time=spec.arrival_time,
        cache_salt=spec.cache_salt,
        beams=BeamParams(spec.n, spec.max_tokens, ignore_eos=spec.ignore_eos) if spec.beams else None,
    )


def _compare(step: int, recorded: list[TraceEvent], replayed: list[TraceEvent]) -> None:
    for old, new in zip_longest(recorded, replayed):
        if old != new:
            raise TraceError(f"replay differs in step {step}: recorded {old}, replayed {new}")

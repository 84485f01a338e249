"""The timeline of a run: a row a sequence, a column a step, so that prefill, decode, waiting and preemption can be seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from minivllm.course.draw import WIDTH, scheduler_of, sequence_name
from minivllm.course.film import NUM_HUES, Film, Frame, Label, Look
from minivllm.plan import EventKind, TraceEvent
from minivllm.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from minivllm.llm import LLM

LEFT, ROW, HEAD, WIDEST = 40.0, 26.0, 20.0, 34.0
LEGEND = (
    "A box is one step of one sequence, with the number of tokens it ran: full colour for prefill (also after a preemption), "
    "pale for decode. Yellow border: it starts from cached blocks. x: preempted. Empty box: waiting."
)


@dataclass(slots=True)
class Track:
    """One sequence's row: the look of each step it was there."""

    hue: str
    num_prompt: int
    since: int
    looks: dict[int, Look] = field(default_factory=dict)
    last: int = 0
    num_hit: int = 0


def draw_timeline(source: Scheduler | LLM, since: int = 1, title: str = "who ran when") -> Film:
    """Every step, from step `since` on, of what a scheduler, or the engine of an `LLM`, has run so far."""
    events = list(scheduler_of(source).recorder.events)
    tracks: dict[str, Track] = {}
    for event in events:
        _follow(tracks, event)
    steps = range(since, max(event.step for event in events) + 1)
    shown = {name: track for name, track in tracks.items() if (track.last or since) >= since}
    film = Film(WIDTH, HEAD + ROW * len(shown) + 4, title, legend=LEGEND)
    pitch = min((WIDTH - LEFT - 4) / len(steps), WIDEST)
    looks: dict[int, Look] = {}
    for row, (name, track) in enumerate(shown.items()):
        looks |= _draw_row(film, row, name, track, steps, pitch)
    film.labels += _step_numbers(steps, pitch)
    film.frames.append(Frame(f"{_count(len(shown), 'sequence')}, {_count(len(steps), 'step')}", looks))
    film.text = "\n".join(f"  {name:>6}: {_row_text(track, steps)}" for name, track in shown.items())
    return film


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _draw_row(film: Film, row: int, name: str, track: Track, steps: range, pitch: float) -> dict[int, Look]:
    """A box for each step that the sequence ran in, and one for each time it waited."""
    film.labels.append(Label(LEFT - 6, HEAD + ROW * row + 16, name, "name"))
    present = [step for step in steps if track.since <= step <= (track.last or step)]
    looks = {}
    for key, group in groupby(present, key=lambda step: step if step in track.looks else "wait"):
        first, *rest = group
        width = pitch * (1 + len(rest)) - 2
        box = film.add_box(LEFT + (first - steps[0]) * pitch, HEAD + ROW * row, width, ROW - 4)
        waited = f"{name} waits in step{'s' * bool(rest)} {'-'.join(map(str, [first, *rest[-1:]]))}"
        looks[box] = Look("wait", "", "", waited) if key == "wait" else _narrow(track.looks[first], pitch)
    return looks


def _follow(tracks: dict[str, Track], event: TraceEvent) -> None:
    """Take one event into the rows: later events of a step win over earlier ones."""
    if event.kind is EventKind.ADDED:
        count = event.spec.n if event.spec else 1
        for index in range(count):
            hue = f"h{len(tracks) % NUM_HUES}"
            tracks[sequence_name(event.request, index)] = Track(hue, len(event.token_ids), event.step + 1)
        return
    if event.kind is EventKind.PREEMPTED:
        for name, track in tracks.items():
            if name.split("/")[0] == event.request and not track.last:
                track.looks[event.step] = Look("dim", "x", "", f"{name} is preempted in step {event.step}")
        return
    name = sequence_name(event.request, event.sequence)
    if name not in tracks:
        return
    track = tracks[name]
    if event.kind is EventKind.HIT:
        track.num_hit = event.tokens
    elif event.kind is EventKind.FINISHED:
        track.last = max(event.step, track.since)
    elif event.kind is EventKind.SCHEDULED:
        track.looks[event.step] = _ran(track, event)
        track.num_hit = 0


def _ran(track: Track, event: TraceEvent) -> Look:
    phase = "decode" if event.start >= track.num_prompt else "prefill"
    cached = f", {track.num_hit} more came from the cache" if track.num_hit else ""
    title = f"step {event.step}: {event.tokens} tokens from position {event.start} ({phase}{cached})"
    return Look(f"held {track.hue} {phase}{' hit' * bool(track.num_hit)}", str(event.tokens), "", title)


def _narrow(look: Look, pitch: float) -> Look:
    """Drop a label that would not fit its box; hovering still tells."""
    return look if len(look.label) * 6 + 2 <= pitch else Look(look.kind, "", "", look.title)


def _step_numbers(steps: range, pitch: float) -> list[Label]:
    every = max(1, round(34 / pitch))
    return [Label(LEFT + (s - steps[0]) * pitch + (pitch - 2) / 2, 13, str(s), "tick") for s in steps[::every]]


def _row_text(track: Track, steps: range) -> str:
    return " ".join(f"{track.looks[s].label if s in track.looks else '.':>3}" for s in steps)

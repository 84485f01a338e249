"""The timeline of a run: a row a sequence, a column a step, so that prefill, decode, waiting and preemption can be seen."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from minivllm.course.draw import WIDTH, scheduler_of
from minivllm.course.film import NUM_HUES, Film, Frame, Label, Look
from minivllm.obs.timeline import Activity, Cell, Lane, build_timeline
from minivllm.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from minivllm.llm import LLM

LEFT, ROW, HEAD, WIDEST = 40.0, 26.0, 20.0, 34.0
LEGEND = (
    "A box is one step of one sequence, with the number of tokens it ran: full colour for prefill (also after a preemption), "
    "pale for decode. Yellow border: it starts from cached blocks. x: preempted. Empty box: waiting."
)


def draw_timeline(source: Scheduler | LLM, since: int = 1, title: str = "who ran when") -> Film:
    """Every step, from step `since` on, of what a scheduler, or the engine of an `LLM`, has run so far."""
    timeline = build_timeline(scheduler_of(source).recorder.events)
    steps = range(since, timeline.last + 1)
    shown = timeline.active(since, timeline.last)
    rows = {lane.name: _looks(lane, f"h{timeline.lanes.index(lane) % NUM_HUES}") for lane in shown}
    film = Film(WIDTH, HEAD + ROW * len(shown) + 4, title, legend=LEGEND)
    pitch = min((WIDTH - LEFT - 4) / len(steps), WIDEST)
    drawn: dict[int, Look] = {}
    for row, lane in enumerate(shown):
        drawn |= _draw_row(film, row, lane, rows[lane.name], steps, pitch)
    film.labels += _step_numbers(steps, pitch)
    film.frames.append(Frame(f"{_count(len(shown), 'sequence')}, {_count(len(steps), 'step')}", drawn))
    film.text = "\n".join(f"  {name:>6}: {_row_text(looks, steps)}" for name, looks in rows.items())
    return film


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _looks(lane: Lane, hue: str) -> dict[int, Look]:
    """The look of each step in which the sequence ran or was preempted."""
    return {
        step: Look("dim", "x", "", f"{lane.name} is preempted in step {step}")
        if cell.activity is Activity.PREEMPTED
        else _ran(step, cell, hue)
        for step, cell in lane.cells.items()
        if cell.activity is not Activity.WAITING
    }


def _ran(step: int, cell: Cell, hue: str) -> Look:
    phase = "decode" if cell.activity is Activity.DECODE else "prefill"
    cached = f", {cell.cached} more came from the cache" if cell.cached else ""
    title = f"step {step}: {cell.tokens} tokens from position {cell.start} ({phase}{cached})"
    return Look(f"held {hue} {phase}{' hit' * bool(cell.cached)}", str(cell.tokens), "", title)


def _draw_row(film: Film, row: int, lane: Lane, looks: dict[int, Look], steps: range, pitch: float) -> dict[int, Look]:
    """A box for each step that the sequence ran in, and one for each time it waited."""
    film.labels.append(Label(LEFT - 6, HEAD + ROW * row + 16, lane.name, "name"))
    last = max(lane.cells) if lane.finished else steps[-1]
    present = [step for step in steps if min(lane.cells) <= step <= last]
    drawn = {}
    for key, group in groupby(present, key=lambda step: step if step in looks else "wait"):
        first, *rest = group
        width = pitch * (1 + len(rest)) - 2
        box = film.add_box(LEFT + (first - steps[0]) * pitch, HEAD + ROW * row, width, ROW - 4)
        waited = f"{lane.name} waits in step{'s' * bool(rest)} {'-'.join(map(str, [first, *rest[-1:]]))}"
        drawn[box] = Look("wait", "", "", waited) if key == "wait" else _narrow(looks[first], pitch)
    return drawn


def _narrow(look: Look, pitch: float) -> Look:
    """Drop a label that would not fit its box; hovering still tells."""
    return look if len(look.label) * 6 + 2 <= pitch else Look(look.kind, "", "", look.title)


def _step_numbers(steps: range, pitch: float) -> list[Label]:
    every = max(1, round(34 / pitch))
    return [Label(LEFT + (s - steps[0]) * pitch + (pitch - 2) / 2, 13, str(s), "tick") for s in steps[::every]]


def _row_text(looks: dict[int, Look], steps: range) -> str:
    return " ".join(f"{looks[s].label if s in looks else '.':>3}" for s in steps)

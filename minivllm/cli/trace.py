"""`trace FILE`: draw what an engine decided, step by step."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.rule import Rule

from minivllm.cli.cache_view import State, state_of, tables_of
from minivllm.cli.perfetto import chrome_trace
from minivllm.cli.trace_view import draw_block_tables, draw_pool, draw_timeline, steps_that_fit, tell_events
from minivllm.config import ConfigError
from minivllm.obs.timeline import Timeline, build_timeline
from minivllm.plan import TraceEvent
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import TraceError, TraceHeader, read_trace, replay

DIFFERS = 1


@dataclass(slots=True)
class Replayed:
    """A trace and what replaying it showed: a state after each step, and why the replay stopped early if it did."""

    header: TraceHeader
    events: list[TraceEvent]
    states: dict[int, State]
    problem: str = ""

    def scheduler_after(self, step: int) -> Scheduler:
        """The scheduler as it stood after a step that replays."""
        return next(s for s in replay(self.header, self.events) if s.recorder.step == step)


def replay_all(path: Path) -> Replayed:
    """Read a trace file and replay it. Raises `TraceError` if it is no trace; a differing replay is told in `problem`."""
    header, events = read_trace(path)
    replayed = Replayed(header, events, {})
    try:
        for scheduler in replay(header, events):
            replayed.states[scheduler.recorder.step] = state_of(scheduler)
    except TraceError as error:
        replayed.problem = str(error)
    return replayed


def parse_steps(text: str | None, timeline: Timeline, fit: int) -> tuple[int, int]:
    """First and last step of a range A:B, either end may be left out; without a range the first `fit` steps.

    Raises `ConfigError` unless the range holds steps of the trace.
    """
    if text is None:
        return timeline.first, min(timeline.last, timeline.first + fit - 1)
    start, colon, stop = text.partition(":")
    try:
        first = max(int(start) if start else timeline.first, timeline.first)
        last = min(int(stop) if stop else timeline.last, timeline.last) if colon else first
    except ValueError:
        first, last = 1, 0
    if first > last:
        raise ConfigError(
            "steps", text, f"must be A:B within {timeline.first}:{timeline.last}, the steps of this trace"
        )
    return first, last


def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written with --trace.", show_default=False)],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Which steps to draw.", show_default="as many as fit")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT", help="Write a file that ui.perfetto.dev and chrome://tracing open, and draw nothing."
        ),
    ] = None,
) -> None:
    """Draw a trace: who ran when, who held which blocks. The trace is replayed through the scheduler on the way.

    Exit code 1 when the replay comes to other decisions than were recorded.
    """
    replayed = replay_all(file)
    timeline = build_timeline(replayed.events)
    if perfetto is not None:
        _write_perfetto(perfetto, replayed, timeline)
    else:
        _draw(Console(), replayed, timeline, steps)
    if replayed.problem:
        print(f"error: {replayed.problem}; states after that are not known", file=sys.stderr)
        raise typer.Exit(DIFFERS)


def _write_perfetto(out: Path, replayed: Replayed, timeline: Timeline) -> None:
    budget = replayed.header.config.max_num_batched_tokens
    document = chrome_trace(timeline, replayed.events, replayed.states, budget)
    try:
        out.write_text(json.dumps(document))
    except OSError as error:
        raise ConfigError("perfetto", str(out), f"can't be written ({error.strerror})") from error
    print(
        f"wrote {out}: open it at https://ui.perfetto.dev or chrome://tracing (one step is drawn as 1 ms)",
        file=sys.stderr,
    )


def _draw(console: Console, replayed: Replayed, timeline: Timeline, steps: str | None) -> None:
    if not timeline.last:
        console.print("This trace holds no step.")
        return
    first, last = parse_steps(steps, timeline, steps_that_fit(timeline, console.width))
    last = min(last, first + steps_that_fit(timeline, console.width) - 1)
    config = replayed.header.config
    console.print(_headline(replayed, timeline))
    console.print(Rule(f"steps {first} to {last} of {timeline.last}"))
    console.print(draw_timeline(timeline, first, last, config.max_num_batched_tokens, console.width, replayed.states))
    if last < timeline.last:
        console.print(f"[dim]the next steps: --steps {last + 1}:{timeline.last}[/dim]")
    told = tell_events(e for e in replayed.events if first <= e.step <= last)
    if told:
        console.print(Rule("decisions"))
        console.print("\n".join(told), markup=False, highlight=False, soft_wrap=True)
    _draw_fullest(console, replayed, range(first, last + 1))


def _headline(replayed: Replayed, timeline: Timeline) -> str:
    header = replayed.header
    verdict = "[red]replay differs[/red]" if replayed.problem else "[green]replay agrees[/green]"
    config = header.config
    return (
        f"[bold]{len(timeline.lanes)} sequences, {timeline.last} steps[/bold] · budget {config.max_num_batched_tokens:,}"
        f" tokens · {header.num_blocks - 1:,} blocks of {config.block_size} · {config.policy} · {verdict}"
    )


def _draw_fullest(console: Console, replayed: Replayed, steps: range) -> None:
    """Block tables after the step of a range that left most blocks held."""
    known = [step for step in steps if step in replayed.states]
    if not known:
        return
    step = max(known, key=lambda s: replayed.states[s].held)
    scheduler = replayed.scheduler_after(step)
    console.print(Rule(f"block tables after step {step}, the fullest of these"))
    console.print(draw_block_tables(tables_of(scheduler.running, scheduler.kv), scheduler.kv.block_size))
    console.print(draw_pool(replayed.states[step], console.width - 40))

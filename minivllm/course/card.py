"""The report card: what a student sees after grading."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table

from minivllm.course.records import End, PartRecord, PartResult, Result, Status

MARKS = {
    Status.PASSED: "[green]✓[/]",
    Status.NOT_STARTED: "[yellow]·[/]",
    Status.NOT_RUN: "[dim]·[/]",
    Status.FAILED: "[red]✗[/]",
    Status.TIMEOUT: "[magenta]⧗[/]",
    Status.SKIPPED: "[red]-[/]",
}


def print_card(result: Result, console: Console | None = None, hints: int = 0) -> None:
    """One exercise: its parts with points, and for each that failed the behaviour, the counterexample and the place."""
    console = console or Console(highlight=False)
    exercise = result.exercise
    title = f"{exercise.id} · {exercise.title} · about {exercise.minutes} minutes"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column("")
    table.add_column("it must be that ...", overflow="fold")
    table.add_column("points", justify="right", no_wrap=True)
    for part in result.parts:
        status = part.status if result.end is End.FINISHED else Status.NOT_RUN
        table.add_row(MARKS[status], escape(part.part.name), f"{result.earned(part)}/{part.part.points}")
    table.add_section()
    table.add_row("", f"[bold]{_verdict(result)}", f"[bold]{result.points}/{exercise.points}")
    console.print(table)
    console.print("[dim]A part earns its points when all its tests pass, and none before.[/]")
    if result.end is not End.FINISHED:
        _explain_end(result, console)
    else:
        for parts in _by_cause(result):
            _explain(parts, result, console)
    _print_hints(result, console, hints)
    for flag in result.flags:
        console.print(f"[yellow]for the lecturer:[/] {escape(flag)}")
    console.print()


def _verdict(result: Result) -> str:
    if result.full:
        return "[green]done"
    if result.end is not End.FINISHED:
        return f"[red]{result.end}"
    return "[yellow]not started" if result.untouched else "[red]not yet"


def _explain_end(result: Result, console: Console) -> None:
    console.print(f"[red]{result.end}:[/] {escape(result.reason)}")
    if result.end in (End.EXITED, End.OUT_OF_TIME) and result.output.strip():
        console.print(Panel(escape(result.output.strip()[-1500:]), title="last it printed", title_align="left"))


def _by_cause(result: Result) -> list[list[PartResult]]:
    """Parts that earned nothing, together where the same sentence about the same place says why."""
    causes: dict[tuple[str, ...], list[PartResult]] = {}
    for part in result.parts:
        if part.status is not Status.PASSED:
            cause = (_sentence(part.worst), part.worst.where) if part.records else (part.part.name,)
            causes.setdefault(cause, []).append(part)
    return list(causes.values())


def _explain(parts: list[PartResult], result: Result, console: Console) -> None:
    """Why parts earned nothing, from the decisive test of the first."""
    part, *others = parts
    if not part.records:
        console.print(f"[red]✗ {escape(part.part.name)}[/]: no test of it ran to its end")
        return
    record = part.worst
    place = f" [dim]({escape(record.where)})[/]" if record.where else ""
    console.print(f"{MARKS[record.status]} [bold]{escape(part.part.name)}[/]")
    names = "all other parts" if len(parts) == len(result.parts) else "; ".join(o.part.name for o in others)
    also = f"\n[dim]the same in:[/] {escape(names)}" if others else ""
    console.print(Padding(f"{escape(_sentence(record))}{place}{also}", (0, 0, 0, 2)))
    details = "\n\n".join(filter(None, [_example(record), record.detail[:1500]]))
    if details:
        console.print(Panel(escape(details), title=escape(record.test), title_align="left", border_style="dim"))


def _sentence(record: PartRecord) -> str:
    if record.status is Status.SKIPPED:
        return "a test was skipped, which counts as not passed"
    return record.why[:600] or record.error


def _example(record: PartRecord) -> str:
    return f"smallest example that fails:\n{record.counterexample[:1500]}" if record.counterexample else ""


def _print_hints(result: Result, console: Console, hints: int) -> None:
    exercise = result.exercise
    if result.full:
        return
    for number, hint in enumerate(exercise.hints[:hints], 1):
        console.print(f"[cyan]hint {number} of {len(exercise.hints)}:[/] {escape(hint)}")
    if not hints and exercise.hints:
        more = f"; there are {len(exercise.hints)}, --hint --hint shows two" if len(exercise.hints) > 1 else ""
        console.print(f"[dim]stuck? --hint shows a hint{more}[/]")


def print_total(results: Sequence[Result], console: Console | None = None) -> None:
    """All exercises in one table."""
    console = console or Console(highlight=False)
    table = Table(box=None)
    for name in ("exercise", "title", "state", "points"):
        table.add_column(name, justify="right" if name == "points" else "left")
    for result in results:
        table.add_row(
            result.exercise.id, result.exercise.title, _verdict(result), f"{result.points}/{result.exercise.points}"
        )
    points, of = sum(r.points for r in results), sum(r.exercise.points for r in results)
    table.add_section()
    table.add_row("[bold]all", "", "", f"[bold]{points}/{of}")
    console.print(table)

"""Draws a trace in the terminal: a timeline of requests by steps, block tables, and the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minivllm.cli.cache_view import BlockView, State, TableView
from minivllm.obs.timeline import Activity, Cell, Lane, Timeline, sequence_name
from minivllm.plan import EventKind, TraceEvent

STYLES = {
    Activity.PREFILL: "bright_blue",
    Activity.RECOMPUTE: "magenta",
    Activity.DECODE: "green",
    Activity.PREEMPTED: "bold red",
    Activity.WAITING: "bright_black",
}
BARS = "▁▂▃▄▅▆▇█"
DECODE, PREEMPTED, WAITING, END = "•", "✗", "·", "■"
MAX_LANES = 40
MAX_EVENTS = 12
TOLD = (EventKind.HIT, EventKind.PREEMPTED, EventKind.REFUSED, EventKind.COPIED, EventKind.FORKED, EventKind.EVICTED,
        EventKind.WITHDRAWN, EventKind.COMPILED, EventKind.STOPPED, EventKind.ABORTED, EventKind.ACCEPTED,
        EventKind.DROPPED)  # fmt: skip


def bar(share: float) -> str:
    """A character whose height is `share` (0 to 1) of a line; more than nothing always shows."""
    return BARS[min(int(share * len(BARS)), len(BARS) - 1)]


# timeline


def draw_timeline(
    timeline: Timeline, first: int, last: int, budget: int, width: int, states: dict[int, State] | None = None
) -> RenderableType:
    """Lanes by steps `first` .. `last`, in at most `width` columns; cells hold token counts where there is room for them.

    `budget` is `max_num_batched_tokens`: bars are shares of it. `states`, by step, add a line of KV use.
    """
    lanes = timeline.active(first, last)
    shown = lanes[:MAX_LANES]
    names = [lane.name for lane in shown]
    margin = max((len(name) for name in [*names, "tokens", "KV used"]), default=0) + 1
    cell = _cell_width(shown, first, last, width - margin)
    steps = range(first, min(last, first + (width - margin) // cell - 1) + 1)
    lines = [_ruler(steps, margin, cell)]
    for name, lane in zip(names, shown, strict=True):
        line = Text(f"{name:<{margin}}", style="bold")
        for step in steps:
            line.append_text(_draw_cell(lane.cells.get(step), budget, cell))
        lines.append(line)
    if len(lanes) > len(shown):
        lines.append(Text(f"… and {len(lanes) - len(shown)} more sequences", style="italic"))
    lines.append(_gauge("tokens", margin, steps, cell, lambda step: timeline.tokens(step) / budget))
    if states:
        lines.append(_gauge("KV used", margin, steps, cell, lambda step: _kv_share(states.get(step))))
    return Group(*lines, legend(numbers=cell > 1))


def steps_that_fit(timeline: Timeline, width: int) -> int:
    """How many steps one screen of `width` columns shows at one column a step."""
    names = [lane.name for lane in timeline.lanes]
    return max(width - max((len(name) for name in [*names, "KV used"]), default=0) - 1, 1)


def _cell_width(lanes: list[Lane], first: int, last: int, room: int) -> int:
    """Wide enough for the largest token count and a space if all steps then fit, else one column a step."""
    counts = [cell.tokens for lane in lanes for step, cell in lane.cells.items() if first <= step <= last]
    wide = len(str(max(counts, default=0))) + 2
    return wide if wide * (last - first + 1) <= room else 1


def _draw_cell(cell: Cell | None, budget: int, width: int) -> Text:
    if cell is None:
        return Text(" " * width)
    style = STYLES[cell.activity]
    end = END if cell.finished else ""
    if width > 1 and cell.tokens:
        return Text(f"{cell.tokens}{end}".ljust(width), style=style)
    return Text((end or _glyph(cell, budget)).ljust(width), style="bold " + style if end else style)


def _glyph(cell: Cell, budget: int) -> str:
    if cell.activity in (Activity.PREFILL, Activity.RECOMPUTE):
        return bar(cell.tokens / budget)
    return {Activity.DECODE: DECODE, Activity.PREEMPTED: PREEMPTED}.get(cell.activity, WAITING)


def _ruler(steps: range, margin: int, width: int) -> Text:
    """Step numbers above the columns, as many as fit without touching."""
    line = [" "] * (len(steps) * width)
    every = width * max(1, -(-6 // width))
    for column in range(0, len(line) - len(str(steps.stop)) + 1, every):
        label = str(steps[column // width])
        line[column : column + len(label)] = label
    return Text(f"{'step':<{margin}}" + "".join(line).rstrip(), style="bright_black")


def _gauge(name: str, margin: int, steps: range, width: int, share: Callable[[int], float | None]) -> Text:
    values = [share(step) for step in steps]
    return Text(f"{name:<{margin}}", style="bright_black").append(
        "".join((bar(v) if v else " ").ljust(width) for v in values), style="yellow"
    )


def _kv_share(state: State | None) -> float | None:
    return state.held / state.usable if state else None


def legend(*, numbers: bool) -> Text:
    """What the signs of the timeline mean; `numbers` where the cells hold token counts."""
    line, run = Text("\n"), "12" if numbers else "▂▅█"
    what = "tokens of a prefill" if numbers else "prefill, share of budget"
    for activity, sign, meaning in (
        (Activity.PREFILL, run, what),
        (Activity.RECOMPUTE, run, "recomputed"),
        (Activity.DECODE, "1" if numbers else DECODE, "decode"),
        (Activity.PREEMPTED, PREEMPTED, "preempted"),
        (Activity.WAITING, WAITING, "waits"),
        (Activity.DECODE, END, "last token"),
    ):
        line.append(sign, style=STYLES[activity]).append(f" {meaning}   ", style="bright_black")
    return line


# block tables


def draw_block_tables(tables: list[TableView], block_size: int) -> RenderableType:
    """Each sequence's blocks in token order; shared and published ones are marked by colour."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(justify="right", style="bright_black")
    grid.add_column()
    for table in tables[:MAX_LANES]:
        slots = len(table.blocks) * block_size
        grid.add_row(table.name, f"{table.num_tokens} of {slots} slots", _blocks(table.blocks))
    if not tables:
        grid.add_row(Text("no sequence holds blocks", style="bright_black"))
    key = Text("block ids: ", style="bright_black").append_text(_blocks([BlockView(7, 1, False)]))
    key.append(" own   ", style="bright_black").append_text(_blocks([BlockView(7, 1, True)]))
    key.append(" published: a later prompt can hit it   ", style="bright_black")
    key.append_text(_blocks([BlockView(7, 2, True)])).append(" shared by several sequences", style="bright_black")
    return Group(grid, Text(), key)


def _blocks(blocks: Iterable[BlockView]) -> Text:
    line = Text()
    for block in blocks:
        style = "reverse magenta" if block.holders > 1 else "cyan" if block.published else "white"
        line.append(f"{block.id}", style=style).append(" ")
    line.rstrip()
    return line


def draw_pool(state: State, width: int) -> Text:
    """The pool as one bar: held, cached and free blocks."""
    width = max(min(width, 60), 10)
    held = -(-state.held * width // state.usable)
    cached = min(-(-state.cached * width // state.usable), width - held)
    line = Text("█" * held, style="yellow").append("▒" * cached, style="cyan")
    line.append("░" * (width - held - cached), style="bright_black")
    line.append(f" {state.held:,} held", style="yellow").append(f" · {state.cached:,} cached", style="cyan")
    return line.append(f" · {state.free:,} free", style="bright_black")


# events


def tell_events(events: Iterable[TraceEvent], limit: int = MAX_EVENTS) -> list[str]:
    """Decisions worth a line each (hits, preemptions, refusals, copies, evictions ...), at most `limit` and how many more.

    A request that is refused again for the same reason isn't told again; evictions of one step are one line.
    """
    lines = [_tell(event) for event in _condense(events)]
    if len(lines) > limit:
        lines[limit:] = [f"… and {len(lines) - limit} more: narrow the range with --steps A:B"]
    return lines


def _condense(events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    refused: dict[str, str] = {}
    for (_, kind), group in groupby((e for e in events if e.kind in TOLD), key=lambda e: (e.step, e.kind)):
        if kind in (EventKind.EVICTED, EventKind.WITHDRAWN):
            first, *rest = group
            yield replace(first, blocks=sum((event.blocks for event in rest), first.blocks))
            continue
        for event in group:
            if kind is not EventKind.REFUSED:
                yield event
            elif refused.get(event.request) != event.reason:
                refused[event.request] = event.reason
                yield event


def _tell(event: TraceEvent) -> str:
    who = sequence_name(event.request, event.sequence)
    ids = ", ".join(map(str, event.blocks[:8])) + (", …" if len(event.blocks) > 8 else "")
    blocks = "block" if len(event.blocks) == 1 else "blocks"
    what = {
        EventKind.HIT: f"{who} starts from {event.tokens:,} cached tokens ({blocks} {ids})",
        EventKind.PREEMPTED: f"{who} is preempted: it gives its blocks back and will compute its tokens again",
        EventKind.REFUSED: f"{who} has to wait: {event.reason}",
        EventKind.COPIED: f"{who} copies block {' to '.join(map(str, event.blocks))} before it writes",
        EventKind.FORKED: f"{who} forks: it shares {blocks} {ids}",
        EventKind.EVICTED: f"evicted from the prefix cache: {blocks} {ids}",
        EventKind.WITHDRAWN: f"withdrawn, because no KV will be written: {blocks} {ids}",
        EventKind.COMPILED: f"{who} may run: its grammar is compiled",
        EventKind.STOPPED: f"{who} stops at {event.reason!r}",
        EventKind.ABORTED: f"{who} is aborted",
        EventKind.ACCEPTED: f"{who} gains {event.tokens:,} tokens by drafts that were right",
        EventKind.DROPPED: f"{who} ran {event.tokens:,} for nothing: it was {event.reason} meanwhile",
    }[event.kind]
    return f"step {event.step:>4}  {what}"

"""`bench`: the workloads that other engines are measured with, as a table or as JSON lines."""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from minivllm.bench.workloads import WORKLOADS
from minivllm.cli.flags import EngineFlags, with_flags
from minivllm.cli.start import progress, spinner, start
from minivllm.config import Count, check_value, one_of
from minivllm.fleet.overlap import steps_per_unit
from minivllm.obs.acceptance import Acceptance

if TYPE_CHECKING:
    from minivllm.bench.measure import Bookkeeping, Result
    from minivllm.llm import LLM

NAME = "minivllm"
DEVICE_MS = 5.0  # a step of an 8B model on an H100: 16 GB of weights at 3.35 TB/s
WHAT = """W1: one request. W2: 32 ragged ones. W3: 16 with a shared prefix, cold and warm; W3-off: without the prefix
cache. W4: a prompt of 2,048 tokens. W5: a fresh process to its first token. W6: 32 JSON objects with a schema and
without. May be repeated."""


@with_flags
def bench(
    engine: EngineFlags,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", metavar="W1|W2|W3|W3-off|W4|W5|W6", help=WHAT, show_default="W1"),
    ] = None,
    reps: Annotated[int, typer.Option(help="Repetitions that count, after one that warms up.")] = 5,
    mode: Annotated[
        str | None, typer.Option(metavar="bf16|fp32", help="Instead of --dtype.", show_default="what --dtype picks")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a repetition on stdout.")] = False,
) -> None:
    """Measure this engine: greedy, random token ids, exactly as many new tokens as the workload says."""
    check_value("reps", reps, Count)
    names = workload or ["W1"]
    for name in names:
        one_of(WORKLOADS).check("workload", name)
    engines = Engines(engine, pick_mode(mode, engine))
    results: dict[str, list[Result]] = defaultdict(list)
    for name, rep, result in run_all(engines, names, reps):
        results[name].append(result)
        if as_json:
            labels = {"engine": NAME, "mode": engines.mode, "workload": name, "rep": rep}
            drafts = result.acceptance.by_position() if result.acceptance else {}
            print(json.dumps(labels | result.metrics | drafts), flush=True)
    if not as_json:
        print_table(results)
    for name, each in results.items():
        if books := [r.bookkeeping for r in each if r.bookkeeping is not None]:
            print(f"{name}: {tell_bookkeeping(books)}", file=sys.stderr)
        if accepted := [r.acceptance for r in each if r.acceptance is not None]:
            print(f"{name}: {sum(accepted, Acceptance())}", file=sys.stderr)


def tell_bookkeeping(books: list[Bookkeeping]) -> str:
    """What scheduling cost here, what of it was hidden, and what hiding it would gain beside a device as fast as a GPU."""
    exposed, hidden, host = (statistics.median(getattr(b, f) for b in books) for f in ("exposed", "hidden", "step_ms"))
    beside = f", and {hidden:.1%} were hidden behind the model" if hidden else ""
    one_by_one, ahead = (steps_per_unit(DEVICE_MS, host, depth) * 1e3 for depth in (0, 1))
    return (
        f"scheduling and bookkeeping took {exposed:.1%} of the time (median){beside}; {host:.2f} ms a step: beside a device"
        f" that takes {DEVICE_MS:g} ms, {one_by_one:.0f} steps/s, with --async-depth 1 {ahead:.0f} (simulated)"
    )


class Engines:
    """The engine that a workload needs; kept for the next one, unless that is the one without a prefix cache or back."""

    def __init__(self, flags: EngineFlags, mode: str) -> None:
        self.flags = flags
        self.mode = mode
        self._caching: bool | None = None
        self._llm: LLM | None = None

    def get(self, *, caching: bool) -> LLM:
        """Start an engine, or take the one that runs."""
        if self._llm is None or self._caching is not caching:
            from minivllm.bench.measure import MODES

            self._llm = None  # first give the memory back
            config = self.flags.config(dtype=MODES[self.mode], enable_prefix_caching=caching)
            self._llm, self._caching = start(self.flags.model, config, tell_memory=True), caching
        return self._llm


def run_all(engines: Engines, names: list[str], reps: int) -> Iterator[tuple[str, int, Result]]:
    """Run workloads one after the other; yields (workload, repetition, result). Repetition 0 warms up and is left out."""
    from minivllm.bench.measure import first_token, repetition

    for name in names:
        llm = None if name == "W5" else engines.get(caching=name not in ("W3-off", "W6"))
        with progress(name, reps + 1) as on_rep:
            for rep in range(reps + 1):
                on_rep(rep, reps + 1)
                result = repetition(llm, name, rep) if llm else first_token(engines.flags.model, engines.mode)
                if rep > 0:
                    yield name, rep, result


def pick_mode(mode: str | None, flags: EngineFlags) -> str:
    """The mode asked for, else the one whose dtype the flags come to; "auto" is what this machine is fast at.

    Raises `ConfigError` for a mode that isn't measured.
    """
    with spinner("loading the engine"):
        from minivllm.bench.measure import MODES
        from minivllm.runner.model_runner import pick_dtype
    if mode is None:
        dtype = str(pick_dtype(flags.config())).removeprefix("torch.")
        mode = next((name for name, value in MODES.items() if value == dtype), dtype)
    one_of(MODES).check("mode", mode)
    return mode


def print_table(results: dict[str, list[Result]]) -> None:
    """Medians of every metric, with the range they moved in."""
    from rich.console import Console
    from rich.table import Table

    table = Table("workload", "metric", box=None, header_style="bold")
    for column in ("median", "least", "most", "repetitions"):
        table.add_column(column, justify="right")
    for name, each in results.items():
        for metric in each[0].metrics:
            values = [r.metrics[metric] for r in each]
            row = (statistics.median(values), min(values), max(values))
            table.add_row(name, metric, *(f"{value:,.4g}" for value in row), str(len(values)))
    Console().print(table)

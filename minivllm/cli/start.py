"""Starts an engine for a command, and shows on stderr what takes long. Nothing here writes to stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.config import EngineConfig
    from minivllm.llm import LLM


def start(model: str | None, config: EngineConfig, *, tell_memory: bool = False) -> LLM:
    """Find, load and wire a model. On a terminal a spinner shows that it loads, and `tell_memory` prints what
    start-up took and the KV cache's arithmetic. Raises `ModelError` or `ConfigError`."""
    with spinner("loading the engine"):
        from minivllm.llm import LLM
        from minivllm.models.fetch import resolve_model
    path = resolve_model(model)  # shows its own progress when it fetches
    with spinner(f"loading {path.name}"):
        llm = LLM(path, config)
    if tell_memory and sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True, highlight=False).print(str(llm.engine.phases), style="dim", markup=False)
        print(llm.engine.kv_memory, file=sys.stderr)
    return llm


@contextmanager
def started(model: str | None, config: EngineConfig, *, tell_memory: bool = False) -> Iterator[LLM]:
    """`start`, and at the end of the block close the trace file if one is written."""
    llm = start(model, config, tell_memory=tell_memory)
    try:
        yield llm
    finally:
        llm.engine.core.scheduler.recorder.close()


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Show `what` on stderr while the block runs, if it is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):
        yield


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if it is a terminal and there is more than one to do; gives `on_step(done, total)`."""
    if total < 2 or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)

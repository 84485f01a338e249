"""A program that stops a rank of its own engine at some point of its life, and prints the error that it gets.

Run as `python -m tests.stopped_rank POINT RANKS MODEL`. A program, as the ranks import it again: so they, too, wait no
longer for each other than it says; and as whoever runs it can end all of its processes, should they hang.
"""

import functools
import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil

from minivllm.config import EngineConfig, MinivllmError
from minivllm.engine import procs, startup
from minivllm.llm import LLM
from minivllm.request import SamplingParams
from minivllm.runner import parallel

POINT, RANKS, MODEL = sys.argv[1:]

parallel.SUM_TIMEOUT = timedelta(seconds=2 if POINT in ("spawned", "meeting") else 8)  # later, the ranks must have met
if POINT == "spawned":
    procs.SUM_TIMEOUT = parallel.SUM_TIMEOUT  # elsewhere it's for processes that really start, which takes longer
if RANKS == "2":
    procs.EXIT_WAIT = 0.5  # nobody else is there to leave


def stop_rank_1(*_: object) -> None:
    """Stop it, if it isn't already."""
    for process in multiprocessing.active_children():
        if process.name == "rank 1":
            psutil.Process(process.pid).suspend()


def before(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, with rank 1 stopped just before it."""

    @functools.wraps(call)
    def stop_and_call(*args: Any) -> Any:
        stop_rank_1()
        return call(*args)

    return stop_and_call


def after(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, with rank 1 stopped just after it."""

    @functools.wraps(call)
    def call_and_stop(*args: Any) -> None:
        call(*args)
        stop_rank_1()

    return call_and_stop


def main() -> None:
    """Start an engine and let it answer, with rank 1 stopped on the way."""
    if POINT == "spawned":
        SpawnProcess.start = after(SpawnProcess.start)  # type: ignore[method-assign]
    if POINT == "meeting":
        procs.join_group = before(procs.join_group)
    if POINT == "loading":
        startup.load_shard = before(startup.load_shard)
    size = int(RANKS)
    config = EngineConfig(num_kv_blocks=65, block_size=4, dtype="float64", device="cpu", tensor_parallel_size=size)
    try:
        llm = LLM(MODEL, config)
        if POINT == "idle":
            stop_rank_1()
            return
        llm.generate("hello", SamplingParams(max_tokens=12, ignore_eos=True), on_step=stop_rank_1)
    except MinivllmError as error:
        print(error)


if __name__ == "__main__":
    main()

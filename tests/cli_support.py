"""Shared by the tests of the command line: scheduler runs without a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minivllm.cli.timeline import State, state_of
from minivllm.config import EngineConfig
from minivllm.plan import TraceEvent
from minivllm.request import Request, SampledToken, SamplingParams
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import Recorder, TraceHeader

TINY = EngineConfig(block_size=4, max_num_batched_tokens=8)
Wish = tuple[int, list[int], int, int]  # arrives after this step, prompt, n, new tokens


@dataclass
class SchedulerRun:
    """What a scheduler did with some requests, with made-up tokens instead of a model's."""

    scheduler: Scheduler
    events: list[TraceEvent]
    states: dict[int, State]


def run_requests(
    config: EngineConfig, num_blocks: int, wishes: list[Wish], *, steps: int = 1000, trace: Path | None = None
) -> SchedulerRun:
    """Schedule until all is done, or for `steps` steps; with `trace`, write a trace file too."""
    max_model_len = (num_blocks - 1) * config.block_size
    recorder = Recorder()
    scheduler = Scheduler(config, num_blocks, max_model_len, (), recorder)
    if trace is not None:
        recorder.write_to(trace, TraceHeader(config, num_blocks, max_model_len, ()))
    run = SchedulerRun(scheduler, [], {})
    todo = list(enumerate(wishes))
    while (todo or scheduler.has_requests) and recorder.step < steps:
        for number, (_, prompt, n, new) in [w for w in todo if w[1][0] <= recorder.step]:
            params = SamplingParams(n=n, max_tokens=new)
            scheduler.add(Request(f"r{number}", prompt, params, max_tokens=new))
        todo = [w for w in todo if w[1][0] > recorder.step]
        plan = scheduler.schedule()
        drawn = [[SampledToken(900 + recorder.step)] * len(row.samples) for row in plan.rows if row.samples]
        scheduler.update(plan, drawn)
        run.states[recorder.step] = state_of(scheduler)
    recorder.close()
    run.events = list(recorder.events)
    return run

"""The processes of tensor parallelism: rank 0 is this process, the others are its children, or torchrun's.

Children watch their parent, so none outlives it, however it ends. When a rank ends, the connections to it break: the
step of the others fails, rank 0 says who ended, and everybody leaves. A rank that is stopped (SIGSTOP, a debugger) breaks
nothing: if it doesn't go on within `SUM_TIMEOUT`, the others give up, and rank 0 kills it.

Source: vLLM 0.32 `v1/executor/multiproc_executor.py:MultiprocExecutor`, `WorkerProc`. There each rank is a process beside the
engine's, rank 0 too, and keeps what it needs to know of running requests; one thread of the engine waits for the end of
any, one of each worker for the end of the engine. Here rank 0 is the engine's own process and says everything anew each
step. Left out: several nodes, Ray.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NoReturn

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist

from minivllm.config import ConfigError, EngineConfig
from minivllm.models.decoder import Decoder
from minivllm.models.loader import LoadedModel, load_model
from minivllm.plan import StepPlan
from minivllm.runner.device_memory import DeviceMemory, read_memory
from minivllm.runner.model_runner import ModelRunner, StepResult, pick_dtype
from minivllm.runner.parallel import SUM_TIMEOUT, Group, LostRankError, RowParallelLinear, join_group

HOST = "127.0.0.1"
EXIT_WAIT = 5.0
"""Seconds within which a process has ended that broke its connections by ending."""


@dataclass(slots=True)
class Team:
    """The processes that rank 0 has started (none under torchrun: they are torchrun's), and the group that they meet in.
    `ended` says why there is none any more."""

    processes: list[SpawnProcess] = field(default_factory=list)
    group: Group = field(init=False)
    ended: str | None = None

    def end(self, error: BaseException | None = None) -> BaseException | None:
        """End the processes, and leave the group; once, for the next engine's group may be there already.

        Returns the error that made it necessary; if a rank has been lost, one that names the rank and how it ended, or in
        what state those are that haven't.
        """
        if isinstance(error, LostRankError):
            lost = wait_for_end(self.processes, EXIT_WAIT) or ", ".join([str(error), *states(self.processes)])
            error = LostRankError(f"{lost}; start the engine again")
        if self.ended is None:
            self.ended = str(error or "nobody needs the ranks any more")
            stop(self.processes)
            if dist.is_initialized():
                dist.destroy_process_group()
        return error


class LeadRunner:
    """Rank 0's runner: tells the others what to run and runs its own part. The first step that fails ends the team, for
    its ranks stand at different places then; later ones say so again."""

    def __init__(self, team: Team, decoder: Decoder, config: EngineConfig, num_blocks: int) -> None:
        self.runner = ModelRunner(decoder, config, num_blocks)
        self.team, self.model, self.backend = team, decoder, self.runner.backend
        team.group.share(num_blocks)
        weakref.finalize(self, team.end)

    def execute(self, plan: StepPlan) -> StepResult:
        """See `engine/core.py:Runner`. Raises `LostRankError` naming the rank that has ended and its exit code."""
        if self.team.ended is not None:
            raise LostRankError(self.team.ended)
        try:
            batches = self.runner.input_batches(plan, "cpu")
            self.team.group.share((plan.moves, [batch.without_logits() for batch in batches]))
            return self.runner.run(plan.moves, [batch.to(self.team.group.device) for batch in batches])
        except Exception as error:
            raise self.team.end(error) or error from None


def serve(rank: int, store: dist.Store | None, path: Path, config: EngineConfig) -> NoReturn:
    """The life of a rank above 0: load its shard, then run step after step until the group breaks. Whoever broke it has
    said why, and Ctrl-C is for rank 0 to hear: this one just leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        group = join_group(rank, config, store)
        _, decoder = load_shard(group, path, config)
        agree_on_free_memory(group)
        runner = ModelRunner(decoder, config, group.share())
        while True:
            moves, batches = group.share()
            runner.run(moves, [batch.to(group.device) for batch in batches])
    except LostRankError:
        os._exit(0)  # at once: gloo's threads abort a process that tidies up while a group is broken


def load_shard(group: Group, path: Path, config: EngineConfig) -> tuple[LoadedModel, Decoder]:
    """A rank's shard of the model at `path`, ready to run. Raises as `load_model` does."""
    dtype = pick_dtype(config)
    loaded = load_model(path, dtype, group.rank, group.size)
    row_linear = partial(RowParallelLinear, all_reduce=group.all_reduce)
    return loaded, Decoder(loaded.config, loaded.weights, dtype=dtype, device=group.device, row_linear=row_linear)


def agree_on_free_memory(group: Group) -> DeviceMemory:
    """Memory that every rank can have at once: where all share one memory, that is a part of what is free.

    Rank 0 sizes the KV cache with it, in blocks that all ranks have. None needs more for a block: rank 0 is among those
    with the most KV heads.
    """
    free = read_memory(group.device).left_bytes
    return DeviceMemory(group.least(free // group.size if group.device.type == "cpu" else free))


def torchrun_size() -> int:
    """How many processes torchrun has started for this run; 1 if this one is alone, or not of torchrun's."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def under_torchrun(config: EngineConfig) -> EngineConfig:
    """The configuration with as many ranks as torchrun has started. Raises `ConfigError` if it asks for another number."""
    size, asked = torchrun_size(), config.tensor_parallel_size
    if size > 1 and asked not in (1, size):
        raise ConfigError("tensor_parallel_size", asked, f"torchrun has started {size} processes; leave it out")
    return replace(config, tensor_parallel_size=size) if size > 1 else config


def form_team(team: Team, path: Path, config: EngineConfig) -> None:
    """Bring all ranks together; at rank 0 it returns when they are there. Under torchrun the others serve in here, and
    leave with exit code 0 when rank 0 has left.

    Raises `LostRankError` if one can't start.
    """
    launched = torchrun_size() > 1
    if launched and (rank := int(os.environ["RANK"])):
        serve(rank, None, path, config)
    team.group = join_group(0, config, None if launched else start_processes(team, path, config))


def start_processes(team: Team, path: Path, config: EngineConfig) -> dist.Store:
    """Start a process for each rank above 0; returns a store to meet them at, when all are there."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=SUM_TIMEOUT)
    spawn = partial(multiprocessing.get_context("spawn").Process, target=be_child, daemon=True)
    ranks = range(1, config.tensor_parallel_size)
    team.processes = [spawn(name=f"rank {rank}", args=(rank, store.port, path, config)) for rank in ranks]
    for process in team.processes:
        process.start()
    give_up = time.monotonic() + SUM_TIMEOUT.total_seconds()
    while not store.check([process.name for process in team.processes]):
        if wait_for_end(team.processes, 0.05) or time.monotonic() > give_up:
            raise LostRankError("not all ranks of tensor parallelism could begin")
    return store


def be_child(rank: int, port: int, path: Path, config: EngineConfig) -> None:
    """The life of a child: say at rank 0's store that it is there, then serve."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    store = dist.TCPStore(HOST, port, is_master=False, timeout=SUM_TIMEOUT)
    store.set(f"rank {rank}", "here")
    serve(rank, store, path, config)


def _leave_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def wait_for_end(processes: list[SpawnProcess], seconds: float) -> str | None:
    """Which process has ended, and how; of several the one that ended worst. None if after a while all still run, or those
    that don't have left because another was lost: with exit code 0."""
    sentinels = connection.wait([process.sentinel for process in processes], seconds)
    ended = [process for process in processes if process.sentinel in sentinels]
    for process in ended:
        process.join()  # its exit code is known a moment after its connections have gone
    worst = max(ended, key=lambda process: abs(process.exitcode or 0), default=None)
    if worst is None or not (code := worst.exitcode):
        return None
    why = signal.Signals(-code).name if code < 0 else "what it wrote says why"
    return f"{worst.name} of {len(processes) + 1} has ended with exit code {code} ({why})"


def states(processes: list[SpawnProcess]) -> list[str]:
    """What the operating system says of each process that hasn't ended, as in "rank 1 is stopped"."""
    return [f"{process.name} is {psutil.Process(process.pid).status()}" for process in processes if process.is_alive()]


def stop(processes: list[SpawnProcess]) -> None:
    """Kill the processes, and wait until they are gone: they hold nothing that must be kept."""
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()

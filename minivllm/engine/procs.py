"""The processes of tensor parallelism: rank 0 is this process, the others are its children, or torchrun's.

Children are daemons that watch their parent, so none outlives it, however it ends. When a child ends, the connection
that the others wait on breaks, and the step fails with an error that names it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import weakref
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
import torch.distributed as dist

from minivllm.config import ConfigError, EngineConfig
from minivllm.models.decoder import Decoder, resolve_device
from minivllm.models.loader import LoadedModel, load_model
from minivllm.plan import StepPlan
from minivllm.runner.kv_memory import free_memory
from minivllm.runner.model_runner import ModelRunner, StepResult, pick_dtype
from minivllm.runner.parallel import SUM_TIMEOUT, Group, LostRankError, RowParallelLinear, join_group

HOST = "127.0.0.1"
EXIT_WAIT = 5.0
"""Seconds in which a process ends whose connections have broken."""


@dataclass(slots=True)
class Team:
    """The group as rank 0 has it, with the processes that it started (none under torchrun: they are torchrun's)."""

    group: Group
    processes: list[SpawnProcess]
    ended: bool = False

    def lost(self, error: LostRankError) -> LostRankError:
        """The same error, naming the rank that ended and how."""
        ended = wait_for_end(self.processes, EXIT_WAIT)
        return LostRankError(f"{ended}; start the engine again") if ended else error

    def end(self) -> None:
        """End the processes, and leave the group; once, for the next engine's group may be there already."""
        if not self.ended:
            self.ended = True
            stop(self.processes)
            dist.destroy_process_group()


class LeadRunner:
    """Rank 0's runner: tells the others what to run and runs its own part. The first step that fails ends the team, for
    its ranks stand at different places then; later ones say so too."""

    def __init__(self, team: Team, decoder: Decoder, config: EngineConfig, num_blocks: int) -> None:
        self.runner = ModelRunner(decoder, config, num_blocks)
        self.team = team
        self.failure = ""
        team.group.share(num_blocks)
        weakref.finalize(self, team.end)

    def execute(self, plan: StepPlan) -> StepResult:
        """See `engine/core.py:Runner`. Raises `LostRankError` naming the rank that has ended and its exit code."""
        if self.failure:
            raise LostRankError(self.failure)
        try:
            batches = self.runner.input_batches(plan, "cpu")
            self.team.group.share((plan.copies, [batch.without_logits() for batch in batches]))
            return self.runner.run(plan.copies, [batch.to(self.team.group.device) for batch in batches])
        except Exception as error:
            cause = self.team.lost(error) if isinstance(error, LostRankError) else error
            self.failure = str(cause)
            self.team.end()
            raise cause from None


def serve(group: Group, path: Path, config: EngineConfig) -> None:
    """What a rank above 0 does: load its shard, then run step after step until rank 0 is gone."""
    _, decoder = load_shard(group, path, config)
    agree_on_free_memory(group, config)
    runner = ModelRunner(decoder, config, group.share())
    while True:
        try:
            copies, batches = group.share()
        except LostRankError:
            return
        runner.run(copies, [batch.to(group.device) for batch in batches])


def load_shard(group: Group, path: Path, config: EngineConfig) -> tuple[LoadedModel, Decoder]:
    """A rank's shard of the model at `path`, ready to run. Raises as `load_model` does."""
    dtype = pick_dtype(config)
    loaded = load_model(path, dtype, group.rank, group.size)
    row_linear = partial(RowParallelLinear, all_reduce=group.all_reduce)
    return loaded, Decoder(loaded.config, loaded.weights, dtype=dtype, device=group.device, row_linear=row_linear)


def agree_on_free_memory(group: Group, config: EngineConfig) -> int:
    """Bytes that every rank can have at once: where all share one memory, that is a part of what is free.

    Rank 0 sizes the KV cache with it, in blocks that all ranks have. None needs more for a block: rank 0 is among those
    with the most KV heads.
    """
    free = free_memory(config.device)
    return group.least(free // group.size if group.device.type == "cpu" else free)


def under_torchrun(config: EngineConfig) -> EngineConfig:
    """The configuration with as many ranks as torchrun has started, if it has started this process.

    Raises `ConfigError` if it asks for another number.
    """
    if not (size := torchrun_size()):
        return config
    asked = config.tensor_parallel_size
    if asked not in (1, size):
        raise ConfigError("tensor_parallel_size", asked, f"torchrun has started {size} processes; leave it out")
    return replace(config, tensor_parallel_size=size)


def torchrun_size() -> int:
    """How many processes torchrun has started for this run; 0 if it is not what started this one, or started it alone."""
    size = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    return size if size > 1 else 0


def form_team(path: Path, config: EngineConfig) -> Team:
    """Bring all ranks together; at rank 0 it returns when they are there. Under torchrun the others serve in here, and
    then leave with exit code 0.

    Raises `LostRankError` if one can't start.
    """
    size, device = config.tensor_parallel_size, resolve_device(config.device)
    if not torchrun_size():
        return start_team(path, config, size, device)
    divide_threads(size)
    group = join_group(int(os.environ["RANK"]), size, device)
    if group.rank == 0:
        return Team(group, [])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it too, and decides what ends
    serve(group, path, config)
    os._exit(0)  # gloo's threads abort a process that takes its time to leave a group that has broken


def start_team(path: Path, config: EngineConfig, size: int, device: torch.device) -> Team:
    """Start a process for each rank above 0, and meet them."""
    divide_threads(size)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=SUM_TIMEOUT)
    spawn = multiprocessing.get_context("spawn").Process
    arguments = [(rank, size, store.port, path, config) for rank in range(1, size)]
    processes = [spawn(target=work, args=args, name=f"rank {args[0]}", daemon=True) for args in arguments]
    try:
        for process in processes:
            process.start()
        while not store.check([process.name for process in processes]):
            if ended := wait_for_end(processes, 0.05):
                raise LostRankError(f"{ended} before it could begin; what it wrote says why")
        return Team(join_group(0, size, device, store), processes)
    except BaseException:
        stop(processes)
        raise


def work(rank: int, size: int, port: int, path: Path, config: EngineConfig) -> None:
    """The life of a child: meet the others at rank 0's store, serve, leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it too, and decides what ends
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    divide_threads(size)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=SUM_TIMEOUT)
    store.set(f"rank {rank}", "here")
    try:
        serve(join_group(rank, size, resolve_device(config.device), store), path, config)
    except LostRankError:  # rank 0 says so, once, for all
        raise SystemExit(1) from None


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def divide_threads(size: int) -> None:
    """Share this machine's cores among the ranks, unless OMP_NUM_THREADS has decided."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))


def wait_for_end(processes: list[SpawnProcess], seconds: float) -> str | None:
    """Which process has ended first, and how; None if all still run after a while."""
    ended = connection.wait([process.sentinel for process in processes], seconds)
    codes = {process.name: process.exitcode for process in processes if process.sentinel in ended}
    if not codes:
        return None
    name, code = min(codes.items(), key=lambda item: item[1] or 0)  # who was killed by a signal left before who noticed
    killed_by = f" ({signal.Signals(-code).name})" if code and code < 0 else ""
    return f"{name} of {len(processes) + 1} has ended with exit code {code}{killed_by}"


def stop(processes: list[SpawnProcess]) -> None:
    """Kill the processes, and wait until they are gone: they hold nothing that must be kept."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()

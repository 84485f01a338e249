"""The processes of tensor parallelism: rank 0 is this process, the others are its children, or torchrun's.

Children watch their parent, so none outlives it, however it ends. When a rank ends, the connections to it break: the
step of the others fails, rank 0 says who ended, and everybody leaves.
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
from typing import NoReturn

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
    """The group as rank 0 has it, with the processes that it started (none under torchrun: they are torchrun's)."""

    group: Group
    processes: list[SpawnProcess]
    ended: bool = False

    def end(self, error: BaseException | None = None) -> BaseException | None:
        """End the processes, and leave the group; once, for the next engine's group may be there already.

        Returns the error that made it necessary; if a rank has been lost, one that names the rank and how it ended.
        """
        if isinstance(error, LostRankError) and (lost := wait_for_end(self.processes, EXIT_WAIT)):
            error = LostRankError(f"{lost}; start the engine again")
        if not self.ended:
            self.ended = True
            stop(self.processes)
            dist.destroy_process_group()
        return error


class LeadRunner:
    """Rank 0's runner: tells the others what to run and runs its own part. The first step that fails ends the team, for
    its ranks stand at different places then; later ones say so again."""

    def __init__(self, team: Team, decoder: Decoder, config: EngineConfig, num_blocks: int) -> None:
        self.runner = ModelRunner(decoder, config, num_blocks)
        self.team, self.model, self.backend = team, decoder, self.runner.backend
        self.failure = ""
        team.group.share(num_blocks)
        weakref.finalize(self, team.end)

    def execute(self, plan: StepPlan) -> StepResult:
        """See `engine/core.py:Runner`. Raises `LostRankError` naming the rank that has ended and its exit code."""
        if self.failure:
            raise LostRankError(self.failure)
        try:
            batches = self.runner.input_batches(plan, "cpu")
            self.team.group.share((plan.moves, [batch.without_logits() for batch in batches]))
            return self.runner.run(plan.moves, [batch.to(self.team.group.device) for batch in batches])
        except Exception as error:
            cause = self.team.end(error) or error
            self.failure = str(cause)
            raise cause from None


def serve(rank: int, store: dist.Store | None, path: Path, config: EngineConfig) -> NoReturn:
    """The life of a rank above 0: load its shard, then run step after step until the group breaks. Whoever broke it has
    said why, and Ctrl-C is for rank 0 to hear: this one just leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    group = join_group(rank, config, store)
    try:
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


def form_team(path: Path, config: EngineConfig) -> Team:
    """Bring all ranks together; at rank 0 it returns when they are there. Under torchrun the others serve in here, and
    leave with exit code 0 when rank 0 has left.

    Raises `LostRankError` if one can't start.
    """
    if torchrun_size() == 1:
        return start_team(path, config)
    rank = int(os.environ["RANK"])
    return serve(rank, None, path, config) if rank else Team(join_group(rank, config), [])


def start_team(path: Path, config: EngineConfig) -> Team:
    """Start a process for each rank above 0, and meet them."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=SUM_TIMEOUT)
    spawn = partial(multiprocessing.get_context("spawn").Process, target=be_child, daemon=True)
    ranks = range(1, config.tensor_parallel_size)
    processes = [spawn(name=f"rank {rank}", args=(rank, store.port, path, config)) for rank in ranks]
    try:
        for process in processes:
            process.start()
        while not store.check([process.name for process in processes]):
            if lost := wait_for_end(processes, 0.05):
                raise LostRankError(f"{lost} before it could begin; what it wrote says why")
        return Team(join_group(0, config, store), processes)
    except BaseException:
        stop(processes)
        raise


def be_child(rank: int, port: int, path: Path, config: EngineConfig) -> None:
    """The life of a child: say at rank 0's store that it is there, then serve."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    store = dist.TCPStore(HOST, port, is_master=False, timeout=SUM_TIMEOUT)
    store.set(f"rank {rank}", "here")
    serve(rank, store, path, config)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def wait_for_end(processes: list[SpawnProcess], seconds: float) -> str | None:
    """Which process has ended, and how; None if all still run after a while. Of several the one that ended worst: those
    who left because it had ended have exit code 0."""
    sentinels = connection.wait([process.sentinel for process in processes], seconds)
    ended = [process for process in processes if process.sentinel in sentinels]
    for process in ended:
        process.join()  # its exit code is known a moment after its connections have gone
    if not ended:
        return None
    worst = max(ended, key=lambda process: abs(process.exitcode or 0))
    killed_by = f" ({signal.Signals(-code).name})" if (code := worst.exitcode or 0) < 0 else ""
    return f"{worst.name} of {len(processes) + 1} has ended with exit code {code}{killed_by}"


def stop(processes: list[SpawnProcess]) -> None:
    """Kill the processes, and wait until they are gone: they hold nothing that must be kept."""
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()

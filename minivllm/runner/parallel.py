"""Tensor parallelism: processes ("ranks") that each hold a shard of every layer and run every step together.

Rank 0 plans, samples and talks; the others only compute. A step starts with one message from rank 0 and needs two sums a
layer (`models/shards.py`). Everything goes through torch.distributed: gloo between CPUs, NCCL between GPUs.

Source: vLLM 0.32 `model_executor/layers/linear.py:RowParallelLinear`, `distributed/parallel_state.py:GroupCoordinator`.
There a sum takes the quickest of several kernels for its size and the GPUs' links (`device_communicators/
cuda_communicator.py:CudaCommunicator.all_reduce`), and a step's message goes through a ring in shared memory
(`device_communicators/shm_broadcast.py:MessageQueue`). Both are left out, as are pipeline and expert parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm.config import EngineConfig, MinivllmError
from minivllm.models.decoder import resolve_device
from minivllm.models.layers import PackedLinear

SUM_TIMEOUT = timedelta(minutes=2)
"""How long a rank waits for the others, at start-up and within a step, and rank 0 for the others to take its message."""

MESSAGE_TIMEOUT = timedelta(days=365)
"""How long the others wait for rank 0's message: as long as nobody asks anything."""


class LostRankError(MinivllmError):
    """The ranks can't go on together: one of them has ended, or doesn't answer."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one engine, seen from one of them. All must make the same calls in the same order; each call waits for
    the others and raises `LostRankError` when they can't come."""

    rank: int
    size: int
    device: torch.device
    messages: dist.ProcessGroup

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in its place."""
        _together(dist.all_reduce, x)
        return x

    def share(self, message: object = None) -> Any:
        """Rank 0's `message`, at every rank. It is pickled, and must hold no tensors of a GPU."""
        box = [message]
        _together(dist.broadcast_object_list, box, group=self.messages)
        return box[0]

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        box = torch.tensor([number])
        _together(dist.all_reduce, box, dist.ReduceOp.MIN, group=self.messages)
        return int(box)


def _together(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return call(*args, **options)
    except (RuntimeError, ValueError) as error:
        # gloo has no error type of its own, and puts a line of C++ in brackets first
        why = str(error).rpartition("] ")[2]
        raise LostRankError(f"the ranks of tensor parallelism have lost each other ({why})") from error


class RowParallelLinear(PackedLinear):
    """A linear layer whose inputs are split: x [T, in / ranks] of this rank -> [T, out], the sum over all ranks.

    It has no bias: each rank would add it. The sum is in the dtype of x: bfloat16 parts that were summed in float32 would
    make no measurable difference (book/decisions/0006-the-second-half.md).
    """

    __slots__ = ("all_reduce",)

    def __init__(self, weight: Tensor, all_reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__(weight)
        self.all_reduce = all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's part of the product, then everybody's."""
        return self.all_reduce(super().__call__(x))


def join_group(rank: int, config: EngineConfig, store: dist.Store | None = None) -> Group:
    """Meet the other ranks at a store, or where torchrun's environment says; returns when all are there.

    The ranks share the cores of this machine, unless OMP_NUM_THREADS has decided; on GPUs each has one of its own. Raises
    `LostRankError` if one doesn't come.
    """
    size, device = config.tensor_parallel_size, resolve_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    backend = "nccl" if device.type == "cuda" else "gloo"
    _together(dist.init_process_group, backend, store=store, rank=rank, world_size=size, timeout=SUM_TIMEOUT)
    timeout = MESSAGE_TIMEOUT if rank else SUM_TIMEOUT
    return Group(rank, size, device, _together(dist.new_group, backend="gloo", timeout=timeout))

"""The form of a kernel's file, and what all of them check and compile with.

A file says, in this order: the formula and its paper (its docstring);
`ref(...)`, the specification in torch; `kernel`, in Triton, and any that runs after it; `launch(...)`, with the arguments of `ref` and the same effect;
`LADDER`, only where it teaches something: earlier forms of the kernel, slowest first, functions `v1`, `v2`... with the
arguments and the effect of `launch`, whose docstrings say what each rung fixes and what it still lacks;
`WRITES`, the arguments that are written, all others being left alone;
`SIZES`, for each size the values tests draw from; `CASES`, sizes that are always tried;
`FREE`, (argument, dimension) whose size nothing else fixes; `inputs(dtype, generator, **sizes)`, arguments of those sizes;
`TOL`, by dtype the largest difference from `ref`, relative and absolute;
`AOT`, what's compiled ahead of time and what must hold for the result;
`bytes_moved(itemsize, **sizes)` and `flops(**sizes)`, what the job needs however it's done;
`BENCH`, what `minivllm_kernels.bench` times on a GPU, the ladder at the first entry only;
`torch_op(...)`, only where torch has operators for the job: takes the arguments of `ref`, prepares what isn't timed, and
returns the function that is, whose result is what `ref` leaves in the last of `WRITES`.

`inputs` makes tensors on the default device, without saying `device`: those of `BENCH` are made on the GPU.

`launch` refuses a wrong argument with `ValueError`, naming it, before anything is written. What is inside index tensors
is trusted: reading it would make the CPU wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, device, dtype


@dataclass(frozen=True)
class Build:
    """One ahead-of-time compilation of a kernel for sizes of a real model, and what's expected of it.

    `arguments` gives Triton's type of every run-time argument, with `:16` where the value (an address in bytes, a size in
    elements) is divisible by 16; `constants` the compile-time ones. `sizes` are those that bytes and FLOPs are counted for.
    `blocks_per_sm` is how many thread blocks must fit on a streaming multiprocessor at once, to hide memory's latency.
    """

    label: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    sizes: Mapping[str, Any]
    num_warps: int = 4
    blocks_per_sm: int = 8
    wide_loads: bool = True
    """Whether it must read global memory 128 bits at a time."""
    matrix: str = ""
    """The tensor-core instruction that it must use: "wgmma" (a warp group multiplies from shared memory), or "mma"
    (a warp from registers) where tiles have fewer than 64 rows; empty where there are no matrix products."""
    itemsize: int = 2
    kernel: str = "kernel"
    """The function that is compiled. Where a file has several, bytes and FLOPs, the whole job's, are counted for `kernel`;
    builds of the others have no `sizes`."""
    not_on: Mapping[int, str] = field(default_factory=dict)
    """Compute capabilities it isn't compiled for, and why."""


@dataclass(frozen=True)
class Timed:
    """Sizes to time a kernel at: all of `inputs`, as counted by `bytes_moved` and `flops`, and large enough that the
    level-2 cache (50 MB on Hopper) holds a small part of what's moved.

    `goal` is the share of a ceiling to reach, None if nothing is promised; `ceiling` is "copy", bytes/s that a large copy
    reads and writes, or "matmul", FLOP/s of a large matrix product in bfloat16.
    """

    label: str
    sizes: Mapping[str, Any]
    goal: float | None = None
    ceiling: str = "copy"
    dtype: dtype = torch.bfloat16


def power_of_2(n: int) -> int:
    """The smallest power of two that's at least n: Triton's tiles have no other sizes."""
    return triton.next_power_of_2(max(n, 1))


def dot_dtype(kind: dtype) -> tl.dtype:
    """The dtype that matrix products multiply for tensors of this dtype: its own, but float32 in Triton's interpreter,
    which multiplies bfloat16 as if its bits were integers (`interpreter.py:create_dot`, Triton 3.7 and 3.9)."""
    return tl.float32 if triton.knobs.runtime.interpret else getattr(tl, str(kind).removeprefix("torch."))


def check_device(name: str, tensor: Tensor) -> device:
    """The device to run on: this tensor's, the current GPU, which Triton launches on, or the CPU in Triton's interpreter."""
    found = tensor.device
    if found.type != "cuda" and not (found.type == "cpu" and triton.knobs.runtime.interpret):
        raise ValueError(f"{name}: must be on a GPU (or the CPU, with TRITON_INTERPRET=1), not on {found}")
    if found.type == "cuda" and found.index != torch.cuda.current_device():
        current = f"cuda:{torch.cuda.current_device()}"
        raise ValueError(f"{name}: must be on the current GPU, {current}, not on {found}: see torch.cuda.set_device")
    return found


def check(name: str, tensor: Tensor, where: device, kind: dtype, shape: tuple[int, ...], rows: int = 0) -> None:
    """Raise `ValueError` unless a tensor has this device, dtype and shape, and is contiguous in all dimensions
    but the first `rows`, whose strides are free."""
    if tensor.device != where:
        raise ValueError(f"{name}: must be on {where}, not on {tensor.device}")
    if tensor.dtype != kind:
        raise ValueError(f"{name}: must be {kind}, not {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: must have shape {list(shape)}, not {list(tensor.shape)}")
    if not is_dense(tensor, rows):
        raise ValueError(f"{name}: must be contiguous from dimension {rows} on, not with strides {tensor.stride()}")


def is_dense(tensor: Tensor, rows: int) -> bool:
    """Whether all dimensions but the first `rows` are one run of memory, as `torch.empty` lays it out:
    strides of dimensions of size 1 don't matter."""
    expected = 1
    for size, stride in reversed(list(zip(tensor.shape[rows:], tensor.stride()[rows:], strict=True))):
        if size > 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


def check_rank(name: str, tensor: Tensor, rank: int) -> tuple[int, ...]:
    """A tensor's shape, after checking its number of dimensions."""
    if tensor.dim() != rank:
        raise ValueError(f"{name}: must have {rank} dimensions, not shape {list(tensor.shape)}")
    return tuple(tensor.shape)


def check_dtype(name: str, tensor: Tensor, known: Mapping[dtype, object]) -> dtype:
    """A tensor's dtype, after checking that the kernel is tested with it."""
    if tensor.dtype not in known:
        raise ValueError(f"{name}: must be one of {', '.join(map(str, known))}, not {tensor.dtype}")
    return tensor.dtype

"""`paged_decode`, with each row's K and V split over several programs: few rows fill a GPU too.

A piece p of a row's positions gives its own softmax's result o_p and the logarithm of its sum of weights,
L_p = log2(sum of 2^score). Then out = sum of 2^(L_p - L) o_p, with L = log2(sum of 2^L_p): that's attention over all
positions, as each piece's weight is its share of the whole sum.

Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023; the merge is of Rabe and Staats,
"Self-attention does not need O(n^2) memory", 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor, device

from minivllm_kernels.gpu import paged_decode
from minivllm_kernels.gpu.form import Build, power_of_2
from minivllm_kernels.gpu.paged_decode import attend, check_arguments, compile_time, group_of, run_time

MAX_SPLITS = 64
"""The program that reduces them has all in its registers: of heads of 256, 64 KiB."""
MIN_PIECE = 256
"""Slots of a piece, at least, so that reading K and V outweighs writing and reading the piece's result."""
PROGRAMS_PER_PROCESSOR = 3
"""Programs that a multiprocessor is given: so many fit at once on Hopper, of heads of 64 to 256 in bfloat16."""
H100_PROCESSORS = 132


def ref(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int,
    window: int | None = None, splits: int | None = None,
) -> None:  # fmt: skip
    """As `paged_decode.ref`: q, out [B, H, D]; cache [2 * Hkv, S, D]; tables int64 [B, M]; lengths int64 [B]. The number of
    splits changes nothing."""
    paged_decode.ref(q, cache, tables, lengths, out, block_size, window)


@triton.jit
def kernel(
    q, cache, tables, lengths, partial, lse, q_stride, table_stride, plane_stride, window, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program a row, KV head and split. Each row's tiles in sight are dealt out by its own length, in pieces of as many;
    the last pieces of a short row are empty: zeros, and an LSE of -inf."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.maximum(length - window, 0)
    begin = first // TILE * TILE
    piece = tl.cdiv(tl.cdiv(length - begin, TILE), splits) * TILE
    start = begin + split * piece
    end = tl.minimum(start + piece, length)
    largest, total, acc = attend(
        q + row * q_stride, cache, tables + row * table_stride, plane_stride, kv_head,
        first, start, end, scale, KV_HEADS, GROUP, DIM, BLOCK_SIZE, BLOCK_G, BLOCK_D, TILE, DOT,
    )  # fmt: skip
    total = tl.where(total == 0, 1.0, total)
    head, head_mask = group_of(kv_head, GROUP, DIM, BLOCK_G, BLOCK_D)
    written = (row * splits + split) * KV_HEADS * GROUP
    tl.store(partial + written * DIM + head, acc / total[:, None], head_mask)
    in_group = tl.arange(0, BLOCK_G)
    tl.store(lse + written + kv_head * GROUP + in_group, largest + tl.log2(total), in_group < GROUP)


@triton.jit
def reduce_kernel(
    partial, lse, out, splits, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program a row and head: its pieces' results, each weighted by its share of the sum of weights."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    element = tl.arange(0, BLOCK_D)
    written = (row * splits + split) * HEADS + head
    log_sums = tl.load(lse + written, split < splits, other=float("-inf"))
    largest = tl.max(log_sums, 0)
    # a row of length 0 has nothing but empty pieces, and -inf - -inf would be NaN
    shares = tl.exp2(log_sums - tl.where(largest == float("-inf"), 0.0, largest))
    mask = (split < splits)[:, None] & (element < DIM)[None, :]
    results = tl.load(partial + written[:, None] * DIM + element[None, :], mask, other=0.0)
    total = tl.sum(shares, 0)
    result = tl.sum(results * shares[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + (row * HEADS + head) * DIM + element, result.to(out.dtype.element_ty), element < DIM)


def launch(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int,
    window: int | None = None, splits: int | None = None,
) -> None:  # fmt: skip
    """As `ref`, with so many splits a row, 1 to 64, or as many as `pick_splits` says. Nothing that's on the GPU is read to
    choose: the CPU doesn't wait, and a CUDA graph that was captured here serves any lengths."""
    check_arguments(q, cache, tables, lengths, out, block_size, window)
    rows, heads, dim = q.shape
    if splits is None:
        longest = tables.shape[1] * block_size
        splits = pick_splits(rows, len(cache) // 2, min(longest, window or longest), processors(q.device))
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits: {splits} must be 1 to {MAX_SPLITS}, or None")
    if splits == 1:
        return paged_decode.launch(q, cache, tables, lengths, out, block_size, window)
    partial = torch.empty(rows, splits, heads, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, splits, heads, dtype=torch.float32, device=q.device)
    numbers, constants = run_time(q, cache, tables, window), compile_time(q, cache, block_size)
    kernel[(rows, len(cache) // 2, splits)](q, cache, tables, lengths, partial, lse, *numbers, **constants)
    reduce_kernel[(rows, heads)](
        partial, lse, out, splits, HEADS=heads, DIM=dim, BLOCK_S=power_of_2(splits), BLOCK_D=power_of_2(dim)
    )


def pick_splits(rows: int, kv_heads: int, longest_slots: int, processors: int) -> int:
    """How many splits give each of so many multiprocessors its programs, `PROGRAMS_PER_PROCESSOR` of them, in one wave,
    without cutting the longest row that may come into pieces shorter than `MIN_PIECE` slots.

    1, which is `paged_decode`, where rows and KV heads alone are enough, or rows too short.
    """
    wanted = PROGRAMS_PER_PROCESSOR * processors // max(1, rows * kv_heads)
    return max(1, min(wanted, longest_slots // MIN_PIECE, MAX_SPLITS))


def processors(where: device) -> int:
    """A GPU's streaming multiprocessors; in the interpreter, which has none, those of an H100."""
    return torch.cuda.get_device_properties(where).multi_processor_count if where.type == "cuda" else H100_PROCESSORS


WRITES = ("out",)
SIZES = paged_decode.SIZES | {"longest": range(1, 300), "splits": (None, 1, 2, 3, 5, 8)}
CASES = (
    {"rows": 3, "kv_heads": 2, "group": 3, "dim": 24, "block_size": 16, "longest": 150, "window": None, "splits": 3},
    {"rows": 3, "kv_heads": 2, "group": 3, "dim": 24, "block_size": 3, "longest": 200, "window": 170, "splits": 2},
    {"rows": 0, "kv_heads": 1, "group": 2, "dim": 16, "block_size": 16, "longest": 1, "window": None, "splits": 2},
    {"rows": 1, "kv_heads": 1, "group": 1, "dim": 1, "block_size": 1, "longest": 1, "window": None, "splits": 5},
    {"rows": 1, "kv_heads": 1, "group": 4, "dim": 64, "block_size": 48, "longest": 600, "window": None, "splits": None},
    {"rows": 2, "kv_heads": 1, "group": 4, "dim": 64, "block_size": 16, "longest": 130, "window": 1, "splits": 4},
)
FREE = paged_decode.FREE
TOL = paged_decode.TOL


def inputs(dtype: torch.dtype, generator: Generator, *, splits: int | None, **sizes: Any) -> dict[str, object]:
    """As `paged_decode.inputs`."""
    return paged_decode.inputs(dtype, generator, **sizes) | {"splits": splits}


def split_build(whole: Build) -> Build:
    """As `paged_decode`'s, but one row of 32,768 slots, which 64 splits share."""
    pieces = {"partial": "*fp32:16", "lse": "*fp32:16"}
    arguments = {name: kind for name, kind in whole.arguments.items() if name != "out"} | pieces
    label = whole.label.replace("4096", "32768")
    return replace(
        whole,
        label=label,
        arguments=arguments,
        sizes=dict(whole.sizes) | {"rows": 1, "longest": 32768},
        blocks_per_sm=PROGRAMS_PER_PROCESSOR,
    )


def reduce_build(heads: int, dim: int, blocks_per_sm: int) -> Build:
    """As many splits as there may be. Its bytes and FLOPs are the split kernel's job, and counted there."""
    return Build(
        f"{heads} heads of {dim}, reduce {MAX_SPLITS} splits",
        {"partial": "*fp32:16", "lse": "*fp32:16", "out": "*bf16:16", "splits": "i32"},
        {"HEADS": heads, "DIM": dim, "BLOCK_S": MAX_SPLITS, "BLOCK_D": dim},
        {},
        blocks_per_sm=blocks_per_sm,
        kernel="reduce_kernel",
    )


AOT = (
    *map(split_build, paged_decode.AOT),
    reduce_build(9, 64, blocks_per_sm=8),
    reduce_build(32, 128, blocks_per_sm=4),
    reduce_build(16, 256, blocks_per_sm=2),
)


def bytes_moved(itemsize: int, *, splits: int | None = None, **sizes: int) -> int:
    """Those of `paged_decode`: what's read and written again of the pieces' results depends on how it's done."""
    return paged_decode.bytes_moved(itemsize, **sizes)


def flops(*, splits: int | None = None, **sizes: int) -> int:
    """Those of `paged_decode`."""
    return paged_decode.flops(**sizes)


BENCH = tuple(replace(timed, sizes={**timed.sizes, "splits": None}, goal=0.8) for timed in paged_decode.BENCH)


def torch_op(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int, window: int | None = None,
    splits: int | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """As `paged_decode`'s."""
    return paged_decode.torch_op(q, cache, tables, lengths, out, block_size, window)

"""Attention of a step's rows, some with one new token and some with many, in one launch.

The softmax and the tiles of K and V are those of `paged_prefill`. What's different is who does what: the GROUP heads that
share a KV head are packed into the rows of one tile of queries, GROUP of them for each token, so that K and V are read once
for all, by a row that decodes too; and a program finds its row itself, by a search over `starts`, so that the grid depends
on the numbers of tokens and rows alone, which a captured CUDA graph fixes.

Dao, "FlashAttention-2", 2023; Ainslie et al., "GQA", 2023; vLLM 0.32, `v1/attention/ops/triton_unified_attention.py`,
`kernel_unified_attention` (the packing and the bound on the grid).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from minivllm_kernels.gpu import paged_decode, paged_prefill
from minivllm_kernels.gpu.form import Build, dot_dtype, power_of_2
from minivllm_kernels.gpu.paged_decode import tile_slots
from minivllm_kernels.gpu.paged_prefill import (
    WARP_GROUP_ROWS,
    attend_visible,
    check_step,
    constants,
    run_time,
    tile_queries,
    warps,
)


def ref(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, block_size: int,
    window: int | None = None,
) -> None:  # fmt: skip
    """q, out [T, H, D]; cache [2 * Hkv, S, D], the K heads first; tables int64 [R, M], block numbers; lengths int64 [R],
    slots in use by a row, its new tokens' among them; starts int64 [R + 1], the first token of each row.

    As `paged_prefill.ref`; a row without tokens is padding, and so are tokens from starts[R] on: `out` stays there.
    """
    paged_prefill.ref(q, cache, tables, lengths, starts, out, block_size, len(q), window)


@triton.jit
def kernel(
    q, cache, tables, lengths, starts, out, q_stride, table_stride, plane_stride, window, scale, rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program a KV head and tile of TOKENS tokens; `scale` is log2(e) / sqrt(D).

    Row r's tiles begin at number starts[r] // TOKENS + r, which leaves each row room enough; tiles left over end at once.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.zeros([], tl.int64)
    high = row + rows
    while row + 1 < high:
        middle = (row + high) // 2
        after = tl.load(starts + middle) // TOKENS + middle > tile
        high = tl.where(after, middle, high)
        row = tl.where(after, row, middle)
    begin = tl.load(starts + row)
    count = (tl.load(starts + row + 1) - begin).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    first_query = (tile - begin // TOKENS - row).to(tl.int32) * TOKENS
    if first_query >= count:
        return
    in_tile = tl.arange(0, BLOCK_M) // GROUP
    head = kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    token = begin + first_query + in_tile
    element = tl.arange(0, BLOCK_D)[None, :]
    mask = ((in_tile < TOKENS) & (first_query + in_tile < count))[:, None] & (element < DIM)
    query = tl.load(q + (token * q_stride + head * DIM)[:, None] + element, mask, other=0.0).to(DOT)
    k_plane = cache + kv_head * plane_stride
    v_plane = cache + (KV_HEADS + kv_head) * plane_stride
    table = tables + row * table_stride

    result = attend_visible(
        query, in_tile, length - count + first_query, length, k_plane, v_plane, table, window, scale,
        TOKENS, BLOCK_M, DIM, BLOCK_SIZE, BLOCK_D, TILE, DOT,
    )  # fmt: skip
    target = out + ((token * HEADS + head) * DIM)[:, None] + element
    tl.store(target, result.to(out.dtype.element_ty), mask)


def launch(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, block_size: int,
    window: int | None = None,
) -> None:  # fmt: skip
    """As `ref`. Rows of q and of tables may lie apart. What tables, lengths and starts say is trusted."""
    check_step(q, cache, tables, lengths, starts, out, block_size, window)
    kv_heads, rows = cache.shape[0] // 2, len(lengths)
    group = q.shape[1] // kv_heads
    packed = tile_rows(group, q.shape[2], q.element_size())
    tiles = len(q) // (packed // group) + rows if rows else 0
    kernel[(kv_heads, tiles)](
        *run_time(q, cache, tables, lengths, starts, out, window), rows, **constants(q, cache, block_size),
        BLOCK_M=packed, DOT=dot_dtype(q.dtype), num_warps=warps(packed, q.shape[2]),
    )  # fmt: skip


def tile_rows(group: int, dim: int, itemsize: int) -> int:
    """Rows of a tile of queries, each a token's head: what one warp group multiplies at once. More would be idle where a
    row decodes, of which only `group` are in use."""
    return max(power_of_2(group), min(WARP_GROUP_ROWS, tile_queries(dim, itemsize)))


WRITES = ("out",)
SIZES = {
    "rows": range(5), "kv_heads": (1, 2), "group": (1, 2, 3), "dim": (4, 24, 64), "block_size": (1, 8, 48),
    "new": (1, 17, 90), "past": (0, 1, 70, 200), "window": (None, 1, 7, 64),
}  # fmt: skip
CASES = (
    {"rows": 3, "kv_heads": 2, "group": 3, "dim": 24, "block_size": 16, "new": 25, "past": 70, "window": None},
    {"rows": 1, "kv_heads": 1, "group": 1, "dim": 256, "block_size": 3, "new": 33, "past": 60, "window": 70},
    {"rows": 0, "kv_heads": 1, "group": 2, "dim": 16, "block_size": 16, "new": 1, "past": 0, "window": None},
    {"rows": 1, "kv_heads": 1, "group": 1, "dim": 1, "block_size": 1, "new": 1, "past": 0, "window": None},
    {"rows": 5, "kv_heads": 1, "group": 2, "dim": 256, "block_size": 16, "new": 20, "past": 61, "window": 16},
    {"rows": 4, "kv_heads": 1, "group": 4, "dim": 16, "block_size": 16, "new": 1, "past": 70, "window": None},
    {"rows": 1, "kv_heads": 2, "group": 3, "dim": 16, "block_size": 16, "new": 5, "past": 62, "window": None},
)
FREE = {("cache", 1), ("tables", 1)}
TOL = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def inputs(dtype: torch.dtype, generator: Generator, **sizes: Any) -> dict[str, object]:
    """Those of `paged_prefill`, whose longest row needn't be known here."""
    arguments = paged_prefill.inputs(dtype, generator, **sizes)
    del arguments["longest"]
    return arguments


def build(kv_heads: int, group: int, dim: int, blocks_per_sm: int, **step: int) -> Build:
    """Rows of `new` tokens after `past`, in blocks of 16."""
    like = paged_prefill.build(kv_heads, group, dim, blocks_per_sm)
    label = f"{kv_heads * group} heads of {dim} on {kv_heads}, {step['rows']} x {step['new']}, bf16"
    packed = tile_rows(group, dim, 2)
    constants = {**like.constants, "BLOCK_M": packed, "TILE": tile_slots(dim, 2)}
    return Build(
        label,
        {**like.arguments, "rows": "i32"},
        constants,
        {**like.sizes, **step},
        num_warps=warps(packed, dim),
        blocks_per_sm=blocks_per_sm,
        matrix="wgmma",
        not_on=like.not_on,
    )


AOT = (
    build(3, 3, 64, blocks_per_sm=2, rows=4, new=512, past=3584),
    build(8, 4, 128, blocks_per_sm=2, rows=4, new=512, past=3584),
    build(8, 4, 128, blocks_per_sm=2, rows=64, new=1, past=4095),
    build(8, 2, 256, blocks_per_sm=1, rows=4, new=512, past=3584),
)


def bytes_moved(itemsize: int, **sizes: Any) -> int:
    """K and V of each row's slots in sight, queries and results."""
    return paged_prefill.bytes_moved(itemsize, **sizes)


def flops(**sizes: Any) -> int:
    """Two matrix products, a multiplication and an addition an element, for the slots that each token sees."""
    return paged_prefill.flops(**sizes)


BENCH = (
    paged_prefill.timed(4, 4096, 0, 8, 4, 128, goal=0.6),
    replace(paged_prefill.timed(64, 1, 4095, 8, 4, 128, goal=0.8), ceiling="copy"),
)


def torch_op(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, block_size: int,
    window: int | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """As `paged_decode`'s where each row has one token, a call for all; else as `paged_prefill`'s, a call a row."""
    if not len(lengths) or not bool((starts.diff() == 1).all()):
        return paged_prefill.torch_op(q, cache, tables, lengths, starts, out, block_size, len(q), window)
    mine = out[: len(lengths)]
    attend_rows = paged_decode.torch_op(q[: len(lengths)], cache, tables, lengths, mine, block_size, window)

    def attend_all() -> Tensor:
        mine.copy_(attend_rows())
        return out

    return attend_all

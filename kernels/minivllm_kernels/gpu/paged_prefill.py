"""Causal attention of a step's tokens, any number a sequence, over its blocks of the KV cache, where they are.

out = softmax(q K^T / sqrt(D)) V, each token seeing its own slot and those before it, or the last `window` of these. The
softmax is that of `paged_decode`, in one pass, but for a tile of queries at once: a tile of K and V that's read once
serves all of them, and the two products are of matrices.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023; Kwon et al.,
"PagedAttention", 2023; Ainslie et al., "GQA", 2023; Agrawal et al., "Sarathi-Serve" (prefill in chunks), 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Generator, Tensor
from torch.nn.attention.bias import causal_lower_right

from minivllm_kernels.gpu.form import Build, Timed, check, check_device, check_dtype, check_rank, dot_dtype, power_of_2
from minivllm_kernels.gpu.paged_decode import MIN_DOT, check_sizes, tile_slots

WARP_GROUP_ROWS = 64
"""Rows of a matrix that a warp group, 4 warps, multiplies in one instruction."""
WARP_GROUP_COLUMNS = 128
"""Elements of a row's sums that a warp group keeps in registers."""
MAX_QUERIES = 128
QUERY_BYTES = 32 * 1024
"""Bytes of queries that a program holds, at most."""
MAX_ROWS = 65535
"""CUDA's largest grid in its second and third dimensions."""


def ref(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, block_size: int,
    longest: int, window: int | None = None,
) -> None:  # fmt: skip
    """q, out [T, H, D]; cache [2 * Hkv, S, D], the K heads first; tables int64 [R, M], block numbers; lengths int64 [R],
    slots in use by a row, its new tokens' among them; starts int64 [R + 1], the first token of each row.

    Row r's n = starts[r + 1] - starts[r] tokens have the positions lengths[r] - n to lengths[r] - 1; n may be 0, and is
    `longest` at most. Tokens from starts[R] on are padding: they aren't read, and what `out` has there stays.
    """
    group, begins = q.shape[1] // (cache.shape[0] // 2), starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        new = slice(begins[row], begins[row + 1])
        at = torch.arange(length - (new.stop - new.start), length, device=q.device)[:, None]
        past = torch.arange(max(0, length - len(at) - window + 1) if window else 0, length, device=q.device)
        hidden = (past > at) | (past <= at - (window or length))
        slots = tables[row, past // block_size] * block_size + past % block_size
        k, v = cache[:, slots].float().repeat_interleave(group, 0).chunk(2)
        scores = q[new].float().transpose(0, 1) @ k.mT / math.sqrt(q.shape[2])
        out[new] = (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1).to(out.dtype)


@triton.jit
def attend(
    query, at, largest, total, acc, k_plane, v_plane, table, begin, end, first, stop, window, scale,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax of queries at positions `at` over the tiles from `begin`, a multiple of TILE, up to `end`.

    With MASKED only slots of [first, stop) are read, and a query sees those that are causal and in its window; without,
    all queries see all slots. Returns the largest score so far of each query, its sum of weights, and acc."""
    element = tl.arange(0, BLOCK_D)[None, :]
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        live = (position >= first) & (position < stop) if MASKED else position >= 0
        block = tl.load(table + position // BLOCK_SIZE, live, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        tile = slot[:, None] * DIM + element
        tile_mask = live[:, None] & (element < DIM)
        k = tl.load(k_plane + tile, tile_mask, other=0.0).to(DOT)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            seen = (position[None, :] <= at[:, None]) & (position[None, :] > at[:, None] - window)
            scores = tl.where(seen & live[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        v = tl.load(v_plane + tile, tile_mask, other=0.0).to(DOT)
        acc = tl.dot(weights.to(DOT), v, acc * rescale[:, None], input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        largest = new_largest
    return largest, total, acc


@triton.jit
def attend_visible(
    query, in_tile, lowest, length, k_plane, v_plane, table, window, scale,
    TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of BLOCK_M queries over the tiles of K and V that any of them sees, masked only where not all do.

    The tile holds TOKENS tokens from position `lowest` on, `in_tile` says which of them each query is of; the row has
    `length` slots. Returns [BLOCK_M, BLOCK_D]."""
    at = lowest + in_tile
    stop = tl.minimum(lowest + TOKENS, length)
    first = tl.maximum(lowest - window + 1, 0)
    # all queries see the tiles from `inner` to `edge`
    inner = tl.maximum(stop - window + TILE - 1, 0) // TILE * TILE
    edge = (lowest + 1) // TILE * TILE
    # finite: a query that has seen nothing yet gets weights exp2(-inf), zero, where -inf - -inf would be NaN
    largest = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest, total, acc = attend(
        query, at, largest, total, acc, k_plane, v_plane, table, first // TILE * TILE, tl.minimum(inner, stop),
        first, stop, window, scale, DIM, BLOCK_SIZE, BLOCK_D, TILE, DOT, MASKED=True,
    )  # fmt: skip
    largest, total, acc = attend(
        query, at, largest, total, acc, k_plane, v_plane, table, inner, edge,
        first, stop, window, scale, DIM, BLOCK_SIZE, BLOCK_D, TILE, DOT, MASKED=False,
    )  # fmt: skip
    largest, total, acc = attend(
        query, at, largest, total, acc, k_plane, v_plane, table, tl.maximum(inner, edge), stop,
        first, stop, window, scale, DIM, BLOCK_SIZE, BLOCK_D, TILE, DOT, MASKED=True,
    )  # fmt: skip
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def kernel(
    q, cache, tables, lengths, starts, out, q_stride, table_stride, plane_stride, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The last rung: only tiles of K and V that some query of the program's sees, masked only where not all do.

    Fixes of `v2`: n tokens from nothing take 2 D n^2 FLOPs a head, and what the tiles at the edges waste, at most
    D n (2 BLOCK_M + 4 TILE). Lacks: each of the heads that share a KV head reads it, GROUP times the bytes (the cache on
    the chip may serve them: they run side by side); `unified_attention` packs them. One program a head, BLOCK_M tokens
    and row; `scale` is log2(e) / sqrt(D).
    """
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    begin = tl.load(starts + row)
    count = (tl.load(starts + row + 1) - begin).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    first_query = tl.program_id(1) * BLOCK_M
    if first_query >= count:
        return
    in_tile = tl.arange(0, BLOCK_M)
    token = begin + first_query + in_tile
    element = tl.arange(0, BLOCK_D)[None, :]
    mask = (first_query + in_tile < count)[:, None] & (element < DIM)
    query = tl.load(q + token[:, None] * q_stride + head * DIM + element, mask, other=0.0).to(DOT)
    kv_head = head // (HEADS // KV_HEADS)
    k_plane = cache + kv_head * plane_stride
    v_plane = cache + (KV_HEADS + kv_head) * plane_stride
    table = tables + row * table_stride

    result = attend_visible(
        query, in_tile, length - count + first_query, length, k_plane, v_plane, table, window, scale,
        BLOCK_M, BLOCK_M, DIM, BLOCK_SIZE, BLOCK_D, TILE, DOT,
    )  # fmt: skip
    target = out + (token[:, None] * HEADS + head) * DIM + element
    tl.store(target, result.to(out.dtype.element_ty), mask)


@triton.jit
def all_tiles(
    q, cache, tables, lengths, starts, out, q_stride, table_stride, plane_stride, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """`v2`: as `kernel`, over all of a row's tiles."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    begin = tl.load(starts + row)
    count = (tl.load(starts + row + 1) - begin).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    in_row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    element = tl.arange(0, BLOCK_D)[None, :]
    mask = (in_row < count)[:, None] & (element < DIM)
    token = begin + in_row[:, None]
    query = tl.load(q + token * q_stride + head * DIM + element, mask, other=0.0).to(DOT)
    kv_head = head // (HEADS // KV_HEADS)
    _, total, acc = attend(
        query, length - count + in_row, tl.full([BLOCK_M], -1e30, tl.float32), tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32), cache + kv_head * plane_stride,
        cache + (KV_HEADS + kv_head) * plane_stride, tables + row * table_stride, 0, length,
        tl.maximum(length - count - window + 1, 0), length, window, scale,
        DIM, BLOCK_SIZE, BLOCK_D, TILE, DOT, MASKED=True,
    )  # fmt: skip
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + (token * HEADS + head) * DIM + element, result.to(out.dtype.element_ty), mask)


@triton.jit
def one_query(
    q, cache, tables, lengths, starts, out, q_stride, table_stride, plane_stride, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`v1`: one program a head, token and row."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    begin = tl.load(starts + row)
    count = (tl.load(starts + row + 1) - begin).to(tl.int32)
    if tl.program_id(1) >= count:
        return
    token = begin + tl.program_id(1)
    at = tl.load(lengths + row).to(tl.int32) - count + tl.program_id(1)
    element = tl.arange(0, BLOCK_D)
    query = tl.load(q + token * q_stride + head * DIM + element, element < DIM, other=0.0).to(tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    k_plane = cache + kv_head * plane_stride
    v_plane = cache + (KV_HEADS + kv_head) * plane_stride
    first = tl.maximum(at - window + 1, 0)
    largest = at * 0.0 - 1e30
    total = at * 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first // TILE * TILE, at + 1, TILE):
        position = start + tl.arange(0, TILE)
        live = (position >= first) & (position <= at)
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, live, other=0).to(tl.int64)
        tile = (block * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * DIM + element[None, :]
        mask = live[:, None] & (element < DIM)[None, :]
        k = tl.load(k_plane + tile, mask, other=0.0).to(tl.float32)
        scores = tl.where(live, tl.sum(query[None, :] * k, 1) * scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.exp2(scores - new_largest)
        rescale = tl.exp2(largest - new_largest)
        v = tl.load(v_plane + tile, mask, other=0.0).to(tl.float32)
        acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
        total = total * rescale + tl.sum(weights, 0)
        largest = new_largest
    tl.store(out + (token * HEADS + head) * DIM + element, (acc / total).to(out.dtype.element_ty), element < DIM)


def launch(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, block_size: int,
    longest: int, window: int | None = None,
) -> None:  # fmt: skip
    """As `ref`. Rows of q and of tables may lie apart. What tables, lengths and starts say is trusted, and so is
    `longest`: further tokens of a row would be left out."""
    check_step(q, cache, tables, lengths, starts, out, block_size, window, longest)
    queries = tile_queries(q.shape[2], q.element_size())
    grid = q.shape[1], triton.cdiv(longest, queries), len(lengths)
    kernel[grid](
        *run_time(q, cache, tables, lengths, starts, out, window), **constants(q, cache, block_size),
        BLOCK_M=queries, DOT=dot_dtype(q.dtype), num_warps=warps(queries, q.shape[2]),
    )  # fmt: skip


def v1(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, block_size: int,
    longest: int, window: int | None = None,
) -> None:  # fmt: skip
    """One query a program, scores by multiplication and sum. The online softmax is there already: no matrix of scores
    is ever in memory.

    Lacks: every query and head reads all of K and V that it sees, 2 D elements for 4 D FLOPs: one FLOP a byte in
    bfloat16, where an H100 does 295 (989 TFLOP/s, 3.35 TB/s), and 2 D n^2 bytes a head for n tokens from nothing.
    No tensor cores.
    """
    check_step(q, cache, tables, lengths, starts, out, block_size, window, longest)
    one_query[(q.shape[1], longest, len(lengths))](
        *run_time(q, cache, tables, lengths, starts, out, window), **constants(q, cache, block_size)
    )


def v2(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, block_size: int,
    longest: int, window: int | None = None,
) -> None:  # fmt: skip
    """Tiles of queries: the products are of matrices, on tensor cores.

    Fixes of `v1`: a tile of K and V that's read serves BLOCK_M queries, BLOCK_M FLOPs a byte in bfloat16.
    Lacks: every tile of queries visits every slot, 4 D n^2 FLOPs a head for n tokens from nothing, twice what's needed,
    or n / window times with a window much shorter than n. And every score is masked, if needed or not.
    """
    check_step(q, cache, tables, lengths, starts, out, block_size, window, longest)
    queries = tile_queries(q.shape[2], q.element_size())
    grid = q.shape[1], triton.cdiv(longest, queries), len(lengths)
    all_tiles[grid](
        *run_time(q, cache, tables, lengths, starts, out, window), **constants(q, cache, block_size),
        BLOCK_M=queries, DOT=dot_dtype(q.dtype), num_warps=warps(queries, q.shape[2]),
    )  # fmt: skip


LADDER = (v1, v2)


def check_step(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, block_size: int,
    window: int | None, longest: int = 0,
) -> None:  # fmt: skip
    """Raise `ValueError`, naming the argument, unless shapes, dtypes, strides and devices are those of `ref`."""
    tokens, heads, dim = check_rank("q", q, 3)
    planes, slots, _ = check_rank("cache", cache, 3)
    rows, width = check_rank("tables", tables, 2)
    where, kind = check_device("q", q), check_dtype("q", q, TOL)
    check("q", q, where, kind, (tokens, heads, dim), rows=1)
    check("cache", cache, where, kind, (planes, slots, dim))
    check("tables", tables, where, torch.int64, (rows, width), rows=1)
    check("lengths", lengths, where, torch.int64, (rows,))
    check("starts", starts, where, torch.int64, (rows + 1,))
    check("out", out, where, kind, (tokens, heads, dim))
    check_sizes(heads, dim, planes, slots, block_size, window)
    if rows > MAX_ROWS:
        raise ValueError(f"lengths: {rows} rows, must be {MAX_ROWS} at most")
    if not 0 <= longest <= tokens:
        raise ValueError(f"longest: {longest} must be 0 to {tokens}, the tokens of q")


def tile_queries(dim: int, itemsize: int) -> int:
    """Queries of one program, for heads of `dim` elements of so many bytes."""
    return max(MIN_DOT, min(MAX_QUERIES, QUERY_BYTES // (power_of_2(dim) * itemsize)))


def warps(queries: int, dim: int) -> int:
    """A warp group for every 64 queries, and for every 128 elements of a head: sums of 64 x 256 take half the registers
    that a thread of one has, and the rest spills."""
    return 4 * max(1, queries // WARP_GROUP_ROWS, triton.cdiv(dim, WARP_GROUP_COLUMNS))


def run_time(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, window: int | None
) -> tuple[Tensor | int | float, ...]:
    """The kernels' arguments but the compile-time ones. No window is one as large as the cache."""
    slots, dim = cache.shape[1:]
    scale = math.log2(math.e) / math.sqrt(dim)
    strides = q.stride(0), tables.stride(0), slots * dim
    return q, cache, tables, lengths, starts, out, *strides, slots if window is None else window, scale


def constants(q: Tensor, cache: Tensor, block_size: int) -> dict[str, int]:
    """The compile-time arguments that all rungs have."""
    heads, dim = q.shape[1:]
    sizes = {"HEADS": heads, "KV_HEADS": cache.shape[0] // 2, "DIM": dim, "BLOCK_SIZE": block_size}
    return sizes | {"BLOCK_D": max(power_of_2(dim), MIN_DOT), "TILE": tile_slots(dim, q.element_size())}


WRITES = ("out",)
SIZES = {
    "rows": range(4), "kv_heads": (1, 2), "group": (1, 3), "dim": (4, 24, 64), "block_size": (1, 8, 48),
    "new": (1, 17, 140), "past": (0, 1, 70, 200), "window": (None, 1, 7, 64),
}  # fmt: skip
CASES = (
    {"rows": 3, "kv_heads": 2, "group": 3, "dim": 24, "block_size": 16, "new": 5, "past": 70, "window": None},
    {"rows": 1, "kv_heads": 1, "group": 1, "dim": 256, "block_size": 3, "new": 33, "past": 60, "window": 70},
    {"rows": 0, "kv_heads": 1, "group": 2, "dim": 16, "block_size": 16, "new": 1, "past": 0, "window": None},
    {"rows": 1, "kv_heads": 1, "group": 1, "dim": 1, "block_size": 1, "new": 1, "past": 0, "window": None},
    {"rows": 4, "kv_heads": 1, "group": 2, "dim": 256, "block_size": 16, "new": 5, "past": 61, "window": 16},
    {"rows": 1, "kv_heads": 2, "group": 3, "dim": 16, "block_size": 16, "new": 5, "past": 62, "window": None},
)
FREE = {("cache", 1), ("tables", 1)}
TOL = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def inputs(
    dtype: torch.dtype, generator: Generator, *, rows: int, kv_heads: int, group: int, dim: int, block_size: int,
    new: int, past: int, window: int | None, ragged: bool = True,
) -> dict[str, object]:  # fmt: skip
    """`ragged`: the first row is the longest, with `new` tokens after `past`, a last one of several is padding; else all are
    as long. Tokens after all rows' are padding too. Pages are permuted; slots that no query sees hold NaN, and so do the
    pages that unused entries of tables point to. `out` holds a number: padding written by mistake becomes NaN."""
    counts = torch.randint(0 if ragged else new, new + 1, (rows,), generator=generator)
    lengths = counts + torch.randint(0 if ragged else past, past + 1, (rows,), generator=generator)
    counts[:1], lengths[:1] = new, new + past
    if ragged and rows > 2:
        counts[-1] = lengths[-1] = 0
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    width = -(-(new + past) // block_size) + 1
    pages = torch.randperm(rows * width + 1, generator=generator)
    tables = pages[: rows * width].view(rows, width).clone()
    position = torch.arange(width * block_size)
    used = (position < lengths[:, None]) & (position > (lengths - counts - (window or new + past + 1))[:, None])
    used &= counts[:, None] > 0
    cache = torch.full((2 * kv_heads, len(pages), block_size, dim), float("nan"), dtype=dtype)
    content = torch.randn(2 * kv_heads, rows, width * block_size, dim, generator=generator).to(dtype)
    content[:, ~used] = float("nan")
    cache[:, tables.flatten()] = content.view(2 * kv_heads, rows * width, block_size, dim)
    tables[~used.view(rows, width, block_size).any(2)] = pages[-1]
    tokens, heads = rows * new + 2, kv_heads * group
    # scores far enough from zero that a tile's largest matters
    q = (4 * torch.randn(tokens, heads + 2, dim, generator=generator)).to(dtype)
    q.masked_fill_((torch.arange(tokens) >= starts[-1])[:, None, None], float("nan"))
    out = torch.full((tokens, heads, dim), 7.0, dtype=dtype)
    return {
        "q": q[:, 2:], "cache": cache.view(2 * kv_heads, -1, dim), "tables": tables, "lengths": lengths,
        "starts": starts, "out": out, "block_size": block_size, "longest": new if rows else 0, "window": window,
    }  # fmt: skip


def build(kv_heads: int, group: int, dim: int, blocks_per_sm: int) -> Build:
    """4 rows of 2048 new tokens after 2048, in blocks of 16."""
    queries = tile_queries(dim, 2)
    return Build(
        f"{kv_heads * group} heads of {dim} on {kv_heads}, 2048 after 2048, bf16",
        {"q": "*bf16:16", "cache": "*bf16:16", "tables": "*i64:16", "lengths": "*i64:16", "starts": "*i64:16"}
        | {"out": "*bf16:16", "q_stride": "i32:16", "table_stride": "i32", "plane_stride": "i32:16"}
        | {"window": "i32", "scale": "fp32"},
        {"HEADS": kv_heads * group, "KV_HEADS": kv_heads, "DIM": dim, "BLOCK_SIZE": 16, "BLOCK_M": queries}
        | {"BLOCK_D": dim, "TILE": tile_slots(dim, 2), "DOT": tl.bfloat16},
        {"rows": 4, "kv_heads": kv_heads, "group": group, "dim": dim, "new": 2048, "past": 2048, "window": None},
        num_warps=warps(queries, dim),
        blocks_per_sm=blocks_per_sm,
        matrix="wgmma",
        not_on={75: "Triton has no tensor-core instruction for it there"},
    )


AOT = (build(3, 3, 64, blocks_per_sm=2), build(8, 4, 128, blocks_per_sm=1), build(8, 2, 256, blocks_per_sm=1))


def bytes_moved(
    itemsize: int, *, rows: int, kv_heads: int, group: int, dim: int, new: int, past: int, window: int | None, **_: int
) -> int:
    """K and V of each row's slots in sight (all rows being as long as the longest), queries and results."""
    seen = min(new + past, new + window - 1 if window else new + past)
    return rows * kv_heads * dim * itemsize * (2 * seen + 2 * group * new)


def flops(*, rows: int, kv_heads: int, group: int, dim: int, new: int, past: int, window: int | None, **_: int) -> int:
    """Two matrix products, a multiplication and an addition an element, for the slots that each token sees."""
    pairs = sum(min(position + 1, window or position + 1) for position in range(past, past + new))
    return 4 * rows * kv_heads * group * dim * pairs


def timed(rows: int, new: int, past: int, kv_heads: int, group: int, dim: int, goal: float | None) -> Timed:
    """Rows of one length, in blocks of 16."""
    return Timed(
        f"{rows} x {new} after {past}, {kv_heads * group} heads of {dim} on {kv_heads}, bf16",
        {"rows": rows, "new": new, "past": past, "kv_heads": kv_heads, "group": group, "dim": dim}
        | {"block_size": 16, "window": None, "ragged": False},
        goal,
        "matmul",
    )


BENCH = (
    timed(4, 4096, 0, 8, 4, 128, goal=0.6),
    timed(4, 2048, 2048, 8, 4, 128, goal=0.6),
    timed(4, 4096, 0, 3, 3, 64, goal=None),
)


def torch_op(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, block_size: int,
    longest: int, window: int | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """torch's attention, a call a row, over K and V that lie in one piece: gathering them isn't timed. Without a window
    its fast kernels know by themselves what is causal, the last query seeing all; a mask made of numbers keeps them off."""
    calls, begins = [], starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        new = slice(begins[row], begins[row + 1])
        at = torch.arange(length - (new.stop - new.start), length, device=q.device)[:, None]
        past = torch.arange(length, device=q.device)
        slots = tables[row, past // block_size] * block_size + past % block_size
        k, v = cache[:, slots].nan_to_num()[None].chunk(2, 1)
        mask = (past <= at) & (past > at - window) if window else causal_lower_right(len(at), length)
        calls.append((new, q[new].transpose(0, 1)[None], k, v, mask))

    def attend_all() -> Tensor:
        for new, query, k, v, mask in calls:
            each = F.scaled_dot_product_attention(query, k, v, mask, enable_gqa=True)
            out[new] = each[0].transpose(0, 1)
        return out

    return attend_all

"""Attention of one new token a sequence over its blocks of the KV cache, where they are.

out = softmax(q K^T / sqrt(D)) V over the sequence's K and V, or the last `window` of them, in one pass: with m the largest
score so far, l the sum of exp(score - m) and acc the sum of exp(score - m) V, a tile with a larger m' first rescales l and
acc by exp(m - m').

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022; Kwon et
al., "PagedAttention", 2023; Ainslie et al., "GQA", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Generator, Tensor

from minivllm_kernels.gpu.form import Build, Timed, check, check_device, check_dtype, check_rank, dot_dtype, power_of_2

MIN_DOT = 16
"""Triton's matrix products have no smaller dimension."""
MAX_TILE = 64
"""Slots read at once, at most."""
TILE_BYTES = 16 * 1024
"""Bytes of K read at once, at most: more, of heads of 256 in float32, spill registers."""
MAX_DIM = 256


def ref(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int, window: int | None = None
) -> None:
    """q, out [B, H, D]; cache [2 * Hkv, S, D], the K heads first; tables int64 [B, M], block numbers; lengths int64 [B],
    slots in use by a row, its new token's among them. A row of length 0 is padding and gets zeros."""
    heads, kv_heads = q.shape[1], cache.shape[0] // 2
    for row, length in enumerate(lengths.tolist()):
        past = torch.arange(max(0, length - window) if window else 0, length, device=q.device)
        slots = tables[row, past // block_size] * block_size + past % block_size
        k, v = cache[:, slots].float().repeat_interleave(heads // kv_heads, 0).chunk(2)
        scores = (k @ q[row, :, :, None].float())[:, :, 0] / math.sqrt(q.shape[2])
        out[row] = (scores.softmax(-1)[:, None] @ v)[:, 0]


@triton.jit
def slots_of(table, position, live, BLOCK_SIZE: tl.constexpr):
    """The slots that hold a row's live positions, by its table of blocks."""
    block = tl.load(table + position // BLOCK_SIZE, live, other=0).to(tl.int64)
    return block * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def group_of(kv_head, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where the elements of the heads that share a KV head lie in a row of queries, and which of the tile's exist."""
    in_group = tl.arange(0, BLOCK_G)[:, None]
    element = tl.arange(0, BLOCK_D)[None, :]
    return (kv_head * GROUP + in_group) * DIM + element, (in_group < GROUP) & (element < DIM)


@triton.jit
def attend(
    q_row, cache, table, plane_stride, kv_head, first, start, end, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A group's attention over the row's positions from `first` and `start` on and before `end`. Returns the largest score
    and the sum of weights, [BLOCK_G], and the weighted sum of V, [BLOCK_G, BLOCK_D]; the scores are in bits, base 2.
    `start` is a multiple of TILE, and some position of its tile counts: a tile of none would compute -inf - -inf."""
    element = tl.arange(0, BLOCK_D)[None, :]
    head, head_mask = group_of(kv_head, GROUP, DIM, BLOCK_G, BLOCK_D)
    query = tl.load(q_row + head, head_mask, other=0.0).to(DOT)
    k_plane = cache + kv_head * plane_stride
    v_plane = cache + (KV_HEADS + kv_head) * plane_stride

    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(start, end, TILE):
        position = at + tl.arange(0, TILE)
        live = (position >= first) & (position < end)
        tile = slots_of(table, position, live, BLOCK_SIZE)[:, None] * DIM + element
        tile_mask = live[:, None] & (element < DIM)
        # dead slots may hold NaN, which no weight of zero would remove: they aren't read
        k = tl.load(k_plane + tile, tile_mask, other=0.0).to(DOT)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        v = tl.load(v_plane + tile, tile_mask, other=0.0).to(DOT)
        acc = acc * rescale[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        largest = new_largest
    return largest, total, acc


@triton.jit
def kernel(
    q, cache, tables, lengths, out, q_stride, table_stride, plane_stride, window, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program a row and KV head: the GROUP heads that share it read its K and V once. `scale` is log2(e) / sqrt(D):
    exp2 is the instruction that GPUs have. `DOT` is the dtype of what matrix products multiply."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    first = tl.maximum(length - window, 0)
    _, total, acc = attend(
        q + row * q_stride, cache, tables + row * table_stride, plane_stride, kv_head,
        first, first // TILE * TILE, length, scale, KV_HEADS, GROUP, DIM, BLOCK_SIZE, BLOCK_G, BLOCK_D, TILE, DOT,
    )  # fmt: skip
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    head, head_mask = group_of(kv_head, GROUP, DIM, BLOCK_G, BLOCK_D)
    tl.store(out + row * KV_HEADS * GROUP * DIM + head, result.to(out.dtype.element_ty), head_mask)


def launch(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int, window: int | None = None
) -> None:
    """As `ref`. Rows of q and of tables may lie apart. Tables and lengths are trusted."""
    check_arguments(q, cache, tables, lengths, out, block_size, window)
    numbers, constants = run_time(q, cache, tables, window), compile_time(q, cache, block_size)
    kernel[(len(q), len(cache) // 2)](q, cache, tables, lengths, out, *numbers, **constants)


def check_arguments(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int, window: int | None
) -> None:
    """Raise `ValueError` unless the arguments are such as `launch` takes."""
    rows, heads, dim = check_rank("q", q, 3)
    planes, slots, _ = check_rank("cache", cache, 3)
    _, width = check_rank("tables", tables, 2)
    where, kind = check_device("q", q), check_dtype("q", q, TOL)
    check("q", q, where, kind, (rows, heads, dim), rows=1)
    check("cache", cache, where, kind, (planes, slots, dim))
    check("tables", tables, where, torch.int64, (rows, width), rows=1)
    check("lengths", lengths, where, torch.int64, (rows,))
    check("out", out, where, kind, (rows, heads, dim))
    check_sizes(heads, dim, planes, slots, block_size, window)


def run_time(q: Tensor, cache: Tensor, tables: Tensor, window: int | None) -> tuple[int, int, int, int, float]:
    """The kernels' numbers, in the order of their arguments: strides, the window, the scale."""
    _, slots, dim = cache.shape
    scale = math.log2(math.e) / math.sqrt(dim)
    return q.stride(0), tables.stride(0), slots * dim, slots if window is None else window, scale


def compile_time(q: Tensor, cache: Tensor, block_size: int) -> dict[str, object]:
    """The kernels' constants."""
    _, heads, dim = q.shape
    kv_heads = len(cache) // 2
    group = heads // kv_heads
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_G": max(power_of_2(group), MIN_DOT),
        "BLOCK_D": max(power_of_2(dim), MIN_DOT),
        "TILE": tile_slots(dim, q.element_size()),
        "DOT": dot_dtype(q.dtype),
    }


def tile_slots(dim: int, itemsize: int) -> int:
    """Slots read at once for heads of `dim` elements of so many bytes."""
    return max(MIN_DOT, min(MAX_TILE, TILE_BYTES // (power_of_2(dim) * itemsize)))


def check_sizes(heads: int, dim: int, planes: int, slots: int, block_size: int, window: int | None) -> None:
    """Raise `ValueError` for sizes that don't go together."""
    if planes % 2 or planes == 0 or heads % (planes // 2) or heads == 0:
        raise ValueError(f"cache: has {planes} planes, must be K and V of a number of heads that divides {heads}")
    if not 0 < dim <= MAX_DIM:
        raise ValueError(f"q: head size {dim} must be 1 to {MAX_DIM}")
    if block_size < 1 or slots % block_size:
        raise ValueError(f"block_size: {block_size} doesn't divide the cache's {slots} slots")
    if window is not None and window < 1:
        raise ValueError(f"window: {window} must be positive, or None")


@triton.jit
def v1_kernel(
    q, cache, tables, lengths, out, q_stride, table_stride, plane_stride, window, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a row and query head. The first loop finds the largest score; the second knows it, and sums."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    first = tl.maximum(length - window, 0)
    element = tl.arange(0, BLOCK_D)
    query = tl.load(q + row * q_stride + head * DIM + element, element < DIM, other=0.0).to(tl.float32)
    table = tables + row * table_stride
    k_plane = cache + head // GROUP * plane_stride
    v_plane = cache + (KV_HEADS + head // GROUP) * plane_stride

    largest = float("-inf")
    for at in range(first, length, TILE):
        position = at + tl.arange(0, TILE)
        live = position < length
        tile = slots_of(table, position, live, BLOCK_SIZE)[:, None] * DIM + element[None, :]
        k = tl.load(k_plane + tile, live[:, None] & (element < DIM)[None, :], other=0.0).to(tl.float32)
        scores = tl.where(live, tl.sum(k * query[None, :], 1) * scale, float("-inf"))
        largest = tl.maximum(largest, tl.max(scores, 0))
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for at in range(first, length, TILE):
        position = at + tl.arange(0, TILE)
        live = position < length
        tile = slots_of(table, position, live, BLOCK_SIZE)[:, None] * DIM + element[None, :]
        tile_mask = live[:, None] & (element < DIM)[None, :]
        k = tl.load(k_plane + tile, tile_mask, other=0.0).to(tl.float32)
        scores = tl.where(live, tl.sum(k * query[None, :], 1) * scale, float("-inf"))
        weights = tl.exp2(scores - largest)
        v = tl.load(v_plane + tile, tile_mask, other=0.0).to(tl.float32)
        total += tl.sum(weights, 0)
        acc += tl.sum(weights[:, None] * v, 0)
    result = acc / tl.where(total == 0, 1.0, total)
    target = out + (row * KV_HEADS * GROUP + head) * DIM + element
    tl.store(target, result.to(out.dtype.element_ty), element < DIM)


def v1(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int, window: int | None = None
) -> None:
    """Fixes what torch lacks: K and V are read where they are, no copy of them is gathered, and no scores are stored.
    Lacks: K is read twice, once for the largest score and once for the weights. And heads of a group know nothing of each
    other: with 32 on 8 they ask for each K and V four times, a row of 4096 slots of 128 in bf16 for 101 MB, not 17."""
    check_arguments(q, cache, tables, lengths, out, block_size, window)
    numbers, constants = run_time(q, cache, tables, window), compile_time(q, cache, block_size)
    del constants["BLOCK_G"], constants["DOT"]
    v1_kernel[q.shape[:2]](q, cache, tables, lengths, out, *numbers, **constants)


@triton.jit
def online_kernel(
    q, cache, tables, lengths, out, q_stride, table_stride, plane_stride, window, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One program a row and SHARED query heads of a group, one loop; products are written out, element by element."""
    row = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1).to(tl.int64) * SHARED
    length = tl.load(lengths + row)
    first = tl.maximum(length - window, 0)
    element = tl.arange(0, BLOCK_D)[None, :]
    in_group = tl.arange(0, BLOCK_G)[:, None]
    head = (first_head + in_group) * DIM + element
    head_mask = (in_group < SHARED) & (element < DIM)
    query = tl.load(q + row * q_stride + head, head_mask, other=0.0).to(tl.float32)
    k_plane = cache + first_head // GROUP * plane_stride
    v_plane = cache + (KV_HEADS + first_head // GROUP) * plane_stride

    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(first, length, TILE):
        position = at + tl.arange(0, TILE)
        live = position < length
        tile = slots_of(tables + row * table_stride, position, live, BLOCK_SIZE)[:, None] * DIM + element
        tile_mask = live[:, None] & (element < DIM)
        k = tl.load(k_plane + tile, tile_mask, other=0.0).to(tl.float32)
        scores = tl.sum(query[:, None, :] * k[None, :, :], 2) * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        v = tl.load(v_plane + tile, tile_mask, other=0.0).to(tl.float32)
        acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], 1)
        total = total * rescale + tl.sum(weights, 1)
        largest = new_largest
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + row * KV_HEADS * GROUP * DIM + head, result.to(out.dtype.element_ty), head_mask)


def launch_online(
    shared: int,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    out: Tensor,
    block_size: int,
    window: int | None,
) -> None:
    """Launch the online kernel for so many heads a program; the more they are, the fewer slots a tile has."""
    check_arguments(q, cache, tables, lengths, out, block_size, window)
    numbers, constants = run_time(q, cache, tables, window), compile_time(q, cache, block_size)
    del constants["DOT"]
    lanes = power_of_2(shared)
    constants |= {"BLOCK_G": lanes, "TILE": max(1, tile_slots(q.shape[2], q.element_size()) // lanes), "SHARED": shared}
    online_kernel[(len(q), q.shape[1] // shared)](q, cache, tables, lengths, out, *numbers, **constants)


def v2(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int, window: int | None = None
) -> None:
    """Fixes the second reading of K: the softmax is online, a larger score rescales what was summed under a smaller one.
    Lacks: a program still has one query head, so that K and V are asked for once a head: 67 MB of that row, not 17."""
    launch_online(1, q, cache, tables, lengths, out, block_size, window)


def v3(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int, window: int | None = None
) -> None:
    """Fixes the reading of K and V by each head of a group: one program has them all, and reads 17 MB.
    Lacks: the products are multiplications of broadcast tiles and sums, which tensor cores don't do. The kernel's are
    products of matrices: that's what queries become once a group's are together, padded to 16 rows."""
    group = q.shape[1] // (len(cache) // 2)
    launch_online(group, q, cache, tables, lengths, out, block_size, window)


LADDER = (v1, v2, v3)
WRITES = ("out",)
SIZES = {
    "rows": range(4), "kv_heads": (1, 2, 3), "group": (1, 2, 3, 4), "dim": (4, 16, 24, 64),
    "block_size": (1, 2, 8, 16, 48), "longest": range(1, 150), "window": (None, 1, 7, 64),
}  # fmt: skip
CASES = (
    {"rows": 3, "kv_heads": 2, "group": 3, "dim": 24, "block_size": 16, "longest": 150, "window": None},
    {"rows": 3, "kv_heads": 2, "group": 3, "dim": 24, "block_size": 3, "longest": 150, "window": 70},
    {"rows": 0, "kv_heads": 1, "group": 2, "dim": 16, "block_size": 16, "longest": 1, "window": None},
    {"rows": 1, "kv_heads": 1, "group": 1, "dim": 1, "block_size": 1, "longest": 1, "window": None},
    {"rows": 2, "kv_heads": 1, "group": 4, "dim": 64, "block_size": 16, "longest": 130, "window": 1},
)
FREE = {("cache", 1), ("tables", 1)}
TOL = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def inputs(
    dtype: torch.dtype, generator: Generator, *, rows: int, kv_heads: int, group: int, dim: int, block_size: int,
    longest: int, window: int | None, ragged: bool = True,
) -> dict[str, object]:  # fmt: skip
    """`ragged`: the first row is the longest, a last one of several is padding; else all are as long. Pages are permuted;
    slots that no row uses hold NaN, and so do the pages that unused entries of tables point to."""
    lengths = torch.randint(1 if ragged else longest, longest + 1, (rows,), generator=generator)
    lengths[:1] = longest
    if ragged and rows > 2:
        lengths[-1] = 0
    width = -(-longest // block_size) + 1
    pages = torch.randperm(rows * width + 1, generator=generator)
    tables = pages[: rows * width].view(rows, width).clone()
    used = torch.arange(width * block_size) < lengths[:, None]
    cache = torch.full((2 * kv_heads, len(pages), block_size, dim), float("nan"), dtype=dtype)
    content = torch.randn(2 * kv_heads, rows, width * block_size, dim, generator=generator).to(dtype)
    content[:, ~used] = float("nan")
    cache[:, tables.flatten()] = content.view(2 * kv_heads, rows * width, block_size, dim)
    tables[torch.arange(width) * block_size >= lengths[:, None]] = pages[-1]
    # scores far enough from zero that a tile's largest matters
    q = (4 * torch.randn(rows, kv_heads * group + 2, dim, generator=generator)).to(dtype)
    heads = (rows, kv_heads * group, dim)
    return {
        "q": q[:, 2:],
        "cache": cache.view(2 * kv_heads, -1, dim),
        "tables": tables,
        "lengths": lengths,
        "out": torch.full(heads, float("nan"), dtype=dtype),
        "block_size": block_size,
        "window": window,
    }


def build(kv_heads: int, group: int, dim: int, blocks_per_sm: int) -> Build:
    """64 rows of 4096 slots in blocks of 16."""
    return Build(
        f"{kv_heads * group} heads of {dim} on {kv_heads}, 4096 slots, bf16",
        {"q": "*bf16:16", "cache": "*bf16:16", "tables": "*i64:16", "lengths": "*i64:16", "out": "*bf16:16"}
        | {"q_stride": "i32:16", "table_stride": "i32", "plane_stride": "i32:16", "window": "i32", "scale": "fp32"},
        {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "BLOCK_SIZE": 16, "BLOCK_G": MIN_DOT, "BLOCK_D": dim}
        | {"TILE": tile_slots(dim, 2), "DOT": tl.bfloat16},
        {"rows": 64, "kv_heads": kv_heads, "group": group, "dim": dim, "longest": 4096, "window": None},
        blocks_per_sm=blocks_per_sm,
        matrix="mma",
        not_on={
            75: "Triton has no tensor-core instruction for it there, and its products' scalar code spills registers"
        },
    )


AOT = (build(3, 3, 64, blocks_per_sm=6), build(8, 4, 128, blocks_per_sm=4), build(8, 2, 256, blocks_per_sm=3))


def bytes_moved(
    itemsize: int, *, rows: int, kv_heads: int, group: int, dim: int, longest: int, window: int | None, **_: int
) -> int:
    """K and V of each row's slots in sight (all rows being as long as the longest), queries and results."""
    seen = min(longest, window or longest)
    return rows * kv_heads * dim * itemsize * (2 * seen + 2 * group)


def flops(*, rows: int, kv_heads: int, group: int, dim: int, longest: int, window: int | None, **_: int) -> int:
    """Two matrix products, a multiplication and an addition an element."""
    return 4 * rows * kv_heads * group * dim * min(longest, window or longest)


def timed(rows: int, longest: int, kv_heads: int, group: int, dim: int, goal: float | None = 0.8) -> Timed:
    """Rows of one length, in blocks of 16."""
    return Timed(
        f"{rows} rows of {longest}, {kv_heads * group} heads of {dim} on {kv_heads}, bf16",
        {"rows": rows, "longest": longest, "kv_heads": kv_heads, "group": group, "dim": dim}
        | {"block_size": 16, "window": None, "ragged": False},
        goal,
    )


# few rows leave most of the GPU without a program: nothing is promised for them
BENCH = (
    timed(64, 4096, 8, 4, 128), timed(64, 4096, 3, 3, 64), timed(64, 4096, 8, 2, 256), timed(4, 32768, 8, 4, 128, None),
)  # fmt: skip


def torch_op(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int, window: int | None = None
) -> Callable[[], Tensor]:
    """torch's attention, over K and V that lie in one piece: gathering them isn't timed."""
    past = torch.arange(int(lengths.max()) if len(lengths) else 0, device=q.device)
    seen = (past < lengths[:, None]) & (past >= lengths[:, None] - (window or len(past)))
    slots = tables[:, past // block_size] * block_size + past % block_size
    k, v = cache[:, slots].transpose(0, 1).nan_to_num().chunk(2, 1)
    mask = None if seen.all() else seen[:, None, None]
    query = q[:, :, None]
    return lambda: F.scaled_dot_product_attention(query, k, v, mask, enable_gqa=True)[:, :, 0]

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
    in_group = tl.arange(0, BLOCK_G)[:, None]
    element = tl.arange(0, BLOCK_D)[None, :]
    head = (kv_head * GROUP + in_group) * DIM + element
    head_mask = (in_group < GROUP) & (element < DIM)
    query = tl.load(q + row * q_stride + head, head_mask, other=0.0).to(DOT)
    k_plane = cache + kv_head * plane_stride
    v_plane = cache + (KV_HEADS + kv_head) * plane_stride
    first = tl.maximum(length - window, 0)

    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first // TILE * TILE, length, TILE):
        position = start + tl.arange(0, TILE)
        live = (position >= first) & (position < length)
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, live, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        tile = slot[:, None] * DIM + element
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
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    target = out + row * KV_HEADS * GROUP * DIM + head
    tl.store(target, result.to(out.dtype.element_ty), head_mask)


def launch(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, block_size: int, window: int | None = None
) -> None:
    """As `ref`. Rows of q and of tables may lie apart. Tables and lengths are trusted."""
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
    group = heads // (planes // 2)
    kernel[(rows, planes // 2)](
        q, cache, tables, lengths, out, q.stride(0), tables.stride(0), slots * dim,
        slots if window is None else window, math.log2(math.e) / math.sqrt(dim),
        KV_HEADS=planes // 2, GROUP=group, DIM=dim, BLOCK_SIZE=block_size,
        BLOCK_G=max(power_of_2(group), MIN_DOT), BLOCK_D=max(power_of_2(dim), MIN_DOT),
        TILE=tile_slots(dim, q.element_size()), DOT=dot_dtype(kind),
    )  # fmt: skip


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
    """`ragged`: the first row is the longest, a last one of several is padding; else all are as long. Pages are permuted; slots that no row uses hold NaN,
    and so do the pages that unused entries of tables point to."""
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

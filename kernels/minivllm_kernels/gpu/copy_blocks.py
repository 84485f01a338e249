"""Copy blocks of the KV cache: copy-on-write, when a sequence wants to write into a block it shares.

cache[:, destination block] = cache[:, source block] for each pair, K and V of all heads.

Kwon et al., "PagedAttention", 2023, section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from minivllm_kernels.gpu.form import Build, Timed, check, check_device, check_dtype, check_rank, power_of_2

MAX_TILE = 2048


def ref(cache: Tensor, sources: Tensor, destinations: Tensor, block_size: int) -> None:
    """cache [2 * Hkv, S, D] of S / block_size blocks, sources and destinations int64 [N]."""
    planes, slots, dim = cache.shape
    blocks = cache.view(planes, slots // block_size, block_size * dim)
    blocks[:, destinations] = blocks[:, sources]


@triton.jit
def kernel(cache, sources, destinations, plane_stride, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """One program a pair, plane and tile: within a plane, a block is one run of RUN = block_size * D elements."""
    pair = tl.program_id(0)
    plane = cache + tl.program_id(1).to(tl.int64) * plane_stride
    offset = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = plane + tl.load(sources + pair) * RUN
    destination = plane + tl.load(destinations + pair) * RUN
    tl.store(destination + offset, tl.load(source + offset, offset < RUN), offset < RUN)


def launch(cache: Tensor, sources: Tensor, destinations: Tensor, block_size: int) -> None:
    """As `ref`, if no block is a destination twice or both source and destination: pairs are copied in any order.
    That's the caller's to see to, and so it is with copy-on-write: a block is copied to one that was free until then,
    and what is copied isn't. Block numbers are trusted."""
    planes, slots, dim = check_rank("cache", cache, 3)
    where, kind = check_device("cache", cache), check_dtype("cache", cache, TOL)
    check("cache", cache, where, kind, (planes, slots, dim))
    (pairs,) = check_rank("sources", sources, 1)
    check("sources", sources, where, torch.int64, (pairs,))
    check("destinations", destinations, where, torch.int64, (pairs,))
    if block_size < 1 or slots % block_size:
        raise ValueError(f"block_size: {block_size} doesn't divide the cache's {slots} slots")
    run = block_size * dim
    tile = min(power_of_2(run), MAX_TILE)
    kernel[(pairs, planes, triton.cdiv(run, tile))](cache, sources, destinations, slots * dim, RUN=run, BLOCK=tile)


WRITES = ("cache",)
SIZES = {
    "pairs": range(4),
    "kv_heads": (1, 2, 3),
    "dim": (1, 24, 64),
    "block_size": (1, 3, 16, 48),
    "blocks": range(8, 12),
}
CASES = (
    {"pairs": 3, "kv_heads": 3, "dim": 24, "block_size": 5, "blocks": 9},
    {"pairs": 0, "kv_heads": 2, "dim": 16, "block_size": 16, "blocks": 4},
    {"pairs": 1, "kv_heads": 1, "dim": 1, "block_size": 1, "blocks": 2},
    {"pairs": 2, "kv_heads": 1, "dim": 80, "block_size": 32, "blocks": 5},
)
FREE: set[tuple[str, int]] = {("cache", 0), ("cache", 2)}
TOL = {torch.bfloat16: 0.0, torch.float16: 0.0, torch.float32: 0.0, torch.int8: 0.0}


def inputs(
    dtype: torch.dtype, generator: Generator, *, pairs: int, kv_heads: int, dim: int, block_size: int, blocks: int,
    shared: bool = True,
) -> dict[str, object]:  # fmt: skip
    """Blocks that aren't copied hold NaN; two pairs may share a source, or none do."""
    blank = float("nan") if dtype.is_floating_point else 99
    cache = torch.full((2 * kv_heads, blocks, block_size, dim), blank, dtype=dtype)
    order = torch.randperm(blocks, generator=generator)
    any_others = torch.randint(blocks - pairs, (pairs,), generator=generator)
    sources = order[pairs:][any_others if shared else slice(pairs)]
    content = 8 * torch.randn(2 * kv_heads, blocks, block_size, dim, generator=generator)
    cache[:, sources] = content.to(dtype)[:, sources]
    cache = cache.view(2 * kv_heads, blocks * block_size, dim)
    return {"cache": cache, "sources": sources, "destinations": order[:pairs].clone(), "block_size": block_size}


AOT = (
    Build(
        "blocks of 16, head size 128, bf16",
        {"cache": "*bf16:16", "sources": "*i64:16", "destinations": "*i64:16", "plane_stride": "i32:16"},
        {"RUN": 2048, "BLOCK": 2048},
        {"pairs": 256, "kv_heads": 8, "dim": 128, "block_size": 16},
        blocks_per_sm=16,
    ),
)


def bytes_moved(itemsize: int, *, pairs: int, kv_heads: int, dim: int, block_size: int, **_: int) -> int:
    """Each block is read and written once."""
    return pairs * (2 * 2 * kv_heads * block_size * dim * itemsize + 16)


def flops(**_: int) -> int:
    """It only moves."""
    return 0


BENCH = (
    Timed(
        "8192 blocks of 16, 8 KV heads of 128, bf16",
        {"pairs": 8192, "kv_heads": 8, "dim": 128, "block_size": 16, "blocks": 16384, "shared": False},
        goal=0.8,
    ),
)


def torch_op(cache: Tensor, sources: Tensor, destinations: Tensor, block_size: int) -> Callable[[], Tensor]:
    """Gather, then `index_copy_`: blocks are written and read once more in between."""
    blocks = cache.unflatten(1, (-1, block_size))

    def copy() -> Tensor:
        blocks.index_copy_(1, destinations, blocks.index_select(1, sources))
        return cache

    return copy

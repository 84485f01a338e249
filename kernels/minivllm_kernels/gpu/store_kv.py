"""Put K and V of a step's tokens into their slots of the KV cache.

cache[h, slots[t]] = k[t, h] and cache[Hkv + h, slots[t]] = v[t, h]. A token with a negative slot is padding and skipped.

Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023. The slot is known beforehand, so
writing walks no block table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from minivllm_kernels.gpu.form import Build, Timed, check, check_device, check_dtype, check_rank, power_of_2


def ref(k: Tensor, v: Tensor, slots: Tensor, cache: Tensor) -> None:
    """k, v [T, Hkv, D], slots int64 [T], cache [2 * Hkv, S, D]."""
    used = slots >= 0
    cache[:, slots[used]] = torch.cat((k, v), 1)[used].transpose(0, 1)


@triton.jit
def kernel(
    k, v, slots, cache, k_stride, v_stride, plane_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a token: its K and V are [HEADS, DIM] in one piece, and go to 2 * HEADS places."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, BLOCK_H)[:, None]
    element = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (element < DIM)
    source = head * DIM + element
    # a cache passes 2**31 elements, and so may a plane's first element
    target = head.to(tl.int64) * plane_stride + slot * DIM + element
    values = cache + tl.cast(plane_stride, tl.int64) * HEADS
    if slot >= 0:
        tl.store(cache + target, tl.load(k + token * k_stride + source, mask), mask)
        tl.store(values + target, tl.load(v + token * v_stride + source, mask), mask)


def launch(k: Tensor, v: Tensor, slots: Tensor, cache: Tensor) -> None:
    """As `ref`. Tokens of k and v may lie apart (slices of a wider projection). Slots are trusted to be below S and to
    differ."""
    tokens, heads, dim = check_rank("k", k, 3)
    _, num_slots, _ = check_rank("cache", cache, 3)
    where, kind = check_device("k", k), check_dtype("k", k, TOL)
    check("k", k, where, kind, (tokens, heads, dim), rows=1)
    check("v", v, where, kind, (tokens, heads, dim), rows=1)
    check("slots", slots, where, torch.int64, (tokens,))
    check("cache", cache, where, kind, (2 * heads, num_slots, dim))
    kernel[(tokens,)](
        k, v, slots, cache, k.stride(0), v.stride(0), num_slots * dim,
        HEADS=heads, DIM=dim, BLOCK_H=power_of_2(heads), BLOCK_D=power_of_2(dim),
    )  # fmt: skip


WRITES = ("cache",)
SIZES = {"tokens": range(6), "kv_heads": (1, 2, 3, 8), "dim": (1, 16, 24, 64), "slots": range(8, 40)}
CASES = (
    {"tokens": 5, "kv_heads": 3, "dim": 24, "slots": 32},
    {"tokens": 0, "kv_heads": 2, "dim": 16, "slots": 16},
    {"tokens": 1, "kv_heads": 1, "dim": 1, "slots": 1},
    {"tokens": 4, "kv_heads": 4, "dim": 64, "slots": 16},
)
FREE = {("cache", 1)}
TOL = {torch.bfloat16: 0.0, torch.float16: 0.0, torch.float32: 0.0, torch.int8: 0.0}


def inputs(
    dtype: torch.dtype, generator: Generator, *, tokens: int, kv_heads: int, dim: int, slots: int, padded: bool = True
) -> dict[str, object]:
    """K and V are slices of one projection; about a quarter of the tokens are padding, if any; the cache is full of NaN."""
    kv = (8 * torch.randn(tokens, 3 * kv_heads, dim, generator=generator)).to(dtype)
    chosen = torch.randperm(slots, generator=generator)[:tokens]
    if padded:
        chosen[torch.rand(tokens, generator=generator) < 0.25] = -1
    blank = float("nan") if dtype.is_floating_point else 99
    cache = torch.full((2 * kv_heads, slots, dim), blank, dtype=dtype)
    return {"k": kv[:, kv_heads : 2 * kv_heads], "v": kv[:, 2 * kv_heads :], "slots": chosen, "cache": cache}


AOT = (
    Build(
        "8 KV heads of 128, bf16",
        {"k": "*bf16:16", "v": "*bf16:16", "slots": "*i64:16", "cache": "*bf16:16"}
        | {"k_stride": "i32:16", "v_stride": "i32:16", "plane_stride": "i32:16"},
        {"HEADS": 8, "DIM": 128, "BLOCK_H": 8, "BLOCK_D": 128},
        {"tokens": 8192, "kv_heads": 8, "dim": 128},
        blocks_per_sm=16,
    ),
)


def bytes_moved(itemsize: int, *, tokens: int, kv_heads: int, dim: int, **_: int) -> int:
    """K and V are read and written once, the slots read."""
    return tokens * (4 * kv_heads * dim * itemsize + 8)


def flops(**_: int) -> int:
    """It only moves."""
    return 0


BENCH = (
    Timed(
        "131072 tokens, 8 KV heads of 128, bf16",
        {"tokens": 131072, "kv_heads": 8, "dim": 128, "slots": 262144, "padded": False},
        goal=0.8,
    ),
)


def torch_op(k: Tensor, v: Tensor, slots: Tensor, cache: Tensor) -> Callable[[], Tensor]:
    """Two `index_copy_`, of K and of V; padding is dropped beforehand."""
    used = slots >= 0
    keys, values = cache.chunk(2)
    k, v, slots = k[used].transpose(0, 1), v[used].transpose(0, 1), slots[used]

    def store() -> Tensor:
        keys.index_copy_(1, slots, k)
        values.index_copy_(1, slots, v)
        return cache

    return store

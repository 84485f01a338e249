"""C++ kernels for CPUs, called on torch tensors: float32 and bfloat16, computed in float32.

Each function checks its arguments and raises `ValueError` naming the one that's wrong before anything is written. The
torch code of the same name in `minivllm.models.layers` is the definition of the layers' functions. Whether the kernels
are there at all says `why_not`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minivllm_kernels.cpu.build import KernelsUnavailable, library, why_not

__all__ = [
    "KernelsUnavailable",
    "add_rms_norm",
    "gated_silu",
    "paged_decode",
    "rms_norm",
    "rotate",
    "store_kv",
    "supports",
    "why_not",
]

DTYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
VECTOR = 32
"""Elements that vector code takes at once: sizes of heads and of feed-forward networks are multiples of this."""
MAX_HEAD_DIM = 512

P, N, F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "rms_norm": (P, P, P, P, N, N, F),
    "gated_silu": (P, P, N, N),
    "rotate": (P, P, P, P, N, N, N, N),
    "store_kv": (P, P, P, P, N, N, N, N, N, N),
    "paged_decode": (P, P, P, P, P, P, N, N, N, N, N, N, N, N, N, F),
}


@cache
def function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """The compiled function for tensors of a dtype."""
    found = getattr(library(), f"{name}_{DTYPES[dtype]}")
    found.argtypes, found.restype = SIGNATURES[name], None
    return found


def supports(dtype: torch.dtype, sizes: Any) -> str | None:
    """Why the kernels can't run a model of this dtype, with these `head_dim` and `intermediate_size`; None if they can."""
    head_dim, inner_size = sizes.head_dim, sizes.intermediate_size
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of {', '.join(map(str, DTYPES))}"
    if head_dim % VECTOR or head_dim > MAX_HEAD_DIM:
        return f"head size {head_dim} is not a multiple of {VECTOR} up to {MAX_HEAD_DIM}"
    return f"feed-forward size {inner_size} is not a multiple of {VECTOR}" if inner_size % VECTOR else None


def check(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise `ValueError` unless a tensor is contiguous, on the CPU, and of this dtype and shape."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name}: must be contiguous {dtype} {list(shape)} on the CPU, not {tensor.dtype} {list(tensor.shape)} "
            f"with strides {tensor.stride()} on {tensor.device}"
        )


def check_heads(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """As `check` for heads [T, H, D] that may be a slice of wider tokens; returns the elements from token to token."""
    inner = tensor.stride()[1:]
    if tensor.dtype != dtype or tensor.shape != shape or inner != (shape[2], 1) or tensor.device.type != "cpu":
        raise ValueError(
            f"{name}: must be {dtype} {list(shape)} on the CPU, each token's heads in one piece, not {tensor.dtype} "
            f"{list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.stride(0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight` for the residual stream x float32 [T, D]; in the weight's dtype."""
    rows, size = x.shape
    check("x", x, torch.float32, rows, size)
    check("weight", weight, weight.dtype, size)
    out = torch.empty_like(x, dtype=weight.dtype)
    run = function("rms_norm", weight.dtype)
    run(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, size, eps)
    return out


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `update` [T, D] to the residual stream x float32 [T, D], in place; returns its `rms_norm`."""
    rows, size = x.shape
    check("x", x, torch.float32, rows, size)
    check("update", update, weight.dtype, rows, size)
    check("weight", weight, weight.dtype, size)
    out = torch.empty_like(update)
    run = function("rms_norm", weight.dtype)
    run(x.data_ptr(), update.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, eps)
    return out


def gated_silu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for gate and up side by side, [T, 2 * inner] -> [T, inner]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    check("gate_up", gate_up, gate_up.dtype, rows, 2 * size)
    if size % VECTOR:
        raise ValueError(f"gate_up: half its width, {size}, must be a multiple of {VECTOR}")
    out = gate_up.new_empty(rows, size)
    function("gated_silu", gate_up.dtype)(gate_up.data_ptr(), out.data_ptr(), rows, size)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads x [T, H, D] by the angles behind cos and signed sin [T, 1, D]."""
    tokens, heads, dim = x.shape
    stride = check_heads("x", x, x.dtype, tokens, heads, dim)
    check("cos", cos, x.dtype, tokens, 1, dim)
    check("sin", sin, x.dtype, tokens, 1, dim)
    out = x.new_empty(x.shape)
    run = function("rotate", x.dtype)
    run(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), tokens, heads, dim, stride)
    return out


def store_kv(k: Tensor, v: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Put k and v [T, Hkv, D] into slots int64 [T] of cache [2 * Hkv, S, D], the K heads first.

    Slots are trusted to be below S.
    """
    tokens, heads, dim = k.shape
    strides = [check_heads(name, x, cache.dtype, tokens, heads, dim) for name, x in (("k", k), ("v", v))]
    check("slots", slots, torch.int64, tokens)
    check("cache", cache, cache.dtype, 2 * heads, cache.shape[1], dim)
    run = function("store_kv", cache.dtype)
    run(k.data_ptr(), v.data_ptr(), slots.data_ptr(), cache.data_ptr(), tokens, heads, dim, *strides, cache.shape[1])


def paged_decode(
    q: Tensor,
    cache: Tensor,
    tokens: Tensor,
    tables: Tensor,
    lengths: Tensor,
    block_size: int,
    out: Tensor,
    window: int | None = None,
) -> None:
    """Attention of B rows of one token each, over K and V where the cache has them.

    Row r is token tokens[r] of q and out [T, H, D]; it attends to its first lengths[r] >= 1 slots, which block table
    tables[r] lists, or to the last `window` of them. `tokens` and `lengths` int64 [B], `tables` int64 [B, M], `cache` [2 * Hkv, S, D], the K heads first.
    Tables and lengths are trusted. Dao et al., "FlashAttention", 2022, without tiles: a row's scores fit the CPU's cache.
    """
    total, heads, dim = q.shape
    rows, (planes, slots, _) = len(tokens), cache.shape
    stride = check_heads("q", q, cache.dtype, total, heads, dim)
    check("cache", cache, cache.dtype, planes, slots, dim)
    check("tokens", tokens, torch.int64, rows)
    check("tables", tables, torch.int64, rows, tables.shape[-1])
    check("lengths", lengths, torch.int64, rows)
    check("out", out, cache.dtype, total, heads, dim)
    if planes % 2 or heads % (planes // 2):
        raise ValueError(f"cache: has {planes} planes, K and V of a number of heads that divides {heads}")
    if dim % VECTOR or dim > MAX_HEAD_DIM:
        raise ValueError(f"q: its head size {dim} must be a multiple of {VECTOR} up to {MAX_HEAD_DIM}")
    pointers = [x.data_ptr() for x in (q, cache, tokens, tables, lengths, out)]
    sizes = (
        rows,
        heads,
        planes // 2,
        dim,
        slots,
        block_size,
        tables.shape[1],
        stride,
        slots if window is None else window,
    )
    function("paged_decode", cache.dtype)(*pointers, *sizes, dim**-0.5)

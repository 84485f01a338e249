"""Rotary position embedding, in place: each pair (a, b) of a head's elements turns by its token's angle.

(a, b) -> (a cos - b sin, b cos + a sin)

Pair i is elements (i, i + D / 2) in the half-split layout (GPT-NeoX, Hugging Face) and (2i, 2i + 1) in the interleaved one.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from minivllm_kernels.gpu.form import Build, Timed, check, check_device, check_dtype, check_rank, power_of_2


def ref(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """x [T, H, D], cos and sin [T, D / 2], of one dtype. Computed in float32."""
    tokens, heads, dim = x.shape
    shape = (tokens, heads, dim // 2, 2) if interleaved else (tokens, heads, 2, dim // 2)
    a, b = x.float().reshape(shape).unbind(-1 if interleaved else -2)
    c, s = cos[:, None].float(), sin[:, None].float()
    x.copy_(torch.stack((a * c - b * s, b * c + a * s), -1 if interleaved else -2).reshape(x.shape))


@triton.jit
def kernel(
    x, cos, sin, x_stride, cos_stride, sin_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    angle = tl.arange(0, BLOCK)
    c = tl.load(cos + token * cos_stride + angle, angle < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * sin_stride + angle, angle < HALF, other=0.0).to(tl.float32)[None, :]
    head = tl.arange(0, BLOCK_H)
    if INTERLEAVED:
        # a head is read in one piece and its pairs parted in registers: a and b apart would skip every other element
        element = tl.arange(0, 2 * BLOCK)[None, :]
        both = x + token * x_stride + head[:, None] * (2 * HALF) + element
        mask = (head[:, None] < HEADS) & (element < 2 * HALF)
        pairs = tl.load(both, mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, [BLOCK_H, BLOCK, 2]))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [BLOCK_H, 2 * BLOCK])
        tl.store(both, turned.to(x.dtype.element_ty), mask)
    else:
        first = x + token * x_stride + head[:, None] * (2 * HALF) + angle[None, :]
        mask = (head[:, None] < HEADS) & (angle[None, :] < HALF)
        a = tl.load(first, mask, other=0.0).to(tl.float32)
        b = tl.load(first + HALF, mask, other=0.0).to(tl.float32)
        tl.store(first, (a * c - b * s).to(x.dtype.element_ty), mask)
        tl.store(first + HALF, (b * c + a * s).to(x.dtype.element_ty), mask)


def launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """As `ref`. Tokens of x, cos and sin may lie apart."""
    tokens, heads, dim = check_rank("x", x, 3)
    where, kind = check_device("x", x), check_dtype("x", x, TOL)
    check("x", x, where, kind, (tokens, heads, dim), rows=1)
    check("cos", cos, where, kind, (tokens, dim // 2), rows=1)
    check("sin", sin, where, kind, (tokens, dim // 2), rows=1)
    if dim % 2 or not dim:
        raise ValueError(f"x: head size {dim} must be even")
    kernel[(tokens,)](
        x, cos, sin, x.stride(0), cos.stride(0), sin.stride(0),
        HEADS=heads, HALF=dim // 2, BLOCK_H=power_of_2(heads), BLOCK=power_of_2(dim // 2), INTERLEAVED=interleaved,
    )  # fmt: skip


WRITES = ("x",)
SIZES = {"tokens": range(5), "heads": (1, 2, 3, 9), "dim": (2, 16, 20, 64), "interleaved": (False, True)}
CASES = (
    {"tokens": 3, "heads": 3, "dim": 20, "interleaved": False},
    {"tokens": 3, "heads": 3, "dim": 20, "interleaved": True},
    {"tokens": 0, "heads": 2, "dim": 16, "interleaved": False},
    {"tokens": 1, "heads": 1, "dim": 2, "interleaved": True},
    {"tokens": 2, "heads": 9, "dim": 64, "interleaved": False},
)
FREE = {("x", 1)}
TOL = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def inputs(
    dtype: torch.dtype, generator: Generator, *, tokens: int, heads: int, dim: int, interleaved: bool
) -> dict[str, object]:
    """Heads are a slice of a wider projection."""
    x = torch.randn(tokens, heads + 2, dim, generator=generator).to(dtype)[:, :heads]
    angles = 100 * torch.rand(tokens, dim // 2, generator=generator)
    return {"x": x, "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype), "interleaved": interleaved}


def build(interleaved: bool) -> Build:
    """32 heads of 128 in one layout."""
    return Build(
        f"{'interleaved' if interleaved else 'half-split'}, 32 heads of 128, bf16",
        {"x": "*bf16:16", "cos": "*bf16:16", "sin": "*bf16:16"}
        | {"x_stride": "i32:16", "cos_stride": "i32:16", "sin_stride": "i32:16"},
        {"HEADS": 32, "HALF": 64, "BLOCK_H": 32, "BLOCK": 64, "INTERLEAVED": interleaved},
        {"tokens": 8192, "heads": 32, "dim": 128, "interleaved": interleaved},
        blocks_per_sm=4,
    )


AOT = (build(False), build(True))


def bytes_moved(itemsize: int, *, tokens: int, heads: int, dim: int, **_: int) -> int:
    """Heads are read and written, cosines and sines read."""
    return tokens * dim * itemsize * (2 * heads + 1)


def flops(*, tokens: int, heads: int, dim: int, **_: int) -> int:
    """Four products and two additions a pair."""
    return 3 * tokens * heads * dim


BENCH = tuple(Timed(f"65536 tokens, {build.label}", {**build.sizes, "tokens": 65536}) for build in AOT)

"""RMSNorm, with the addition to the residual stream before it.

x += update;  out = x / sqrt(mean(x**2) + eps) * weight

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. In two kernels the residual stream is read twice and
written once; fused, it's read once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Generator, Tensor

from minivllm_kernels.gpu.form import Build, Timed, check, check_device, check_dtype, check_rank, power_of_2

MAX_SIZE = 16384
"""A row is held in registers, so that it's read once."""


def ref(x: Tensor, update: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """x [T, D] float32 or the weight's dtype, update and out [T, D] and weight [D] of one dtype. Without `update`, x is left
    alone. Computed in float32; x + update is rounded to x's dtype first."""
    if update is not None:
        x += update
    out.copy_(F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight.float())


@triton.jit
def kernel(x, update, weight, out, SIZE: tl.constexpr, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    element = tl.arange(0, BLOCK)
    mask = element < SIZE
    value = tl.load(x + row + element, mask, other=0.0)
    if ADD:
        added = value.to(tl.float32) + tl.load(update + row + element, mask, other=0.0).to(tl.float32)
        value = added.to(value.dtype)
        tl.store(x + row + element, value, mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = wide * scale * tl.load(weight + element, mask, other=0.0).to(tl.float32)
    tl.store(out + row + element, normed.to(out.dtype.element_ty), mask)


def launch(x: Tensor, update: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """As `ref`, for D up to 16,384."""
    tokens, size = check_rank("x", x, 2)
    where, kind = check_device("x", x), check_dtype("weight", weight, TOL)
    check("x", x, where, x.dtype if x.dtype == torch.float32 else kind, (tokens, size))
    if update is not None:
        check("update", update, where, kind, (tokens, size))
    check("weight", weight, where, kind, (size,))
    check("out", out, where, kind, (tokens, size))
    if not 0 < size <= MAX_SIZE:
        raise ValueError(f"x: rows of {size} elements, must be 1 to {MAX_SIZE}")
    kernel[(tokens,)](
        x, out if update is None else update, weight, out, size, eps,
        ADD=update is not None, BLOCK=power_of_2(size), num_warps=8 if size > 2048 else 4,
    )  # fmt: skip


WRITES = ("x", "out")
SIZES = {"tokens": range(5), "size": range(1, 200), "add": (False, True), "wide": (False, True)}
CASES = (
    {"tokens": 3, "size": 77, "add": True, "wide": True},
    {"tokens": 3, "size": 77, "add": True, "wide": False},
    {"tokens": 0, "size": 64, "add": True, "wide": True},
    {"tokens": 1, "size": 1, "add": False, "wide": False},
    {"tokens": 4, "size": 576, "add": False, "wide": True},
)
FREE: set[tuple[str, int]] = set()
TOL = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def inputs(
    dtype: torch.dtype, generator: Generator, *, tokens: int, size: int, add: bool, wide: bool
) -> dict[str, object]:
    """`wide`: the residual stream is float32 whatever the weights are. The second row is zeros, which `eps` is for."""
    x, update = torch.randn(2, tokens, size, generator=generator)
    x[1:2] = update[1:2] = 0
    return {
        "x": x.to(torch.float32 if wide else dtype),
        "update": update.to(dtype) if add else None,
        "weight": torch.randn(size, generator=generator).to(dtype),
        "out": torch.full((tokens, size), float("nan"), dtype=dtype),
        "eps": 1e-5,
    }


AOT = (
    Build(
        "add and norm, 4096, residual float32, bf16",
        {"x": "*fp32:16", "update": "*bf16:16", "weight": "*bf16:16", "out": "*bf16:16", "eps": "fp32"},
        {"SIZE": 4096, "ADD": True, "BLOCK": 4096},
        {"tokens": 8192, "size": 4096, "add": True, "wide": True},
        num_warps=8,
        blocks_per_sm=4,
    ),
)


def bytes_moved(itemsize: int, *, tokens: int, size: int, add: bool, wide: bool) -> int:
    """The residual stream is read, and written if added to; the update is read and the result written."""
    stream = tokens * size * (4 if wide else itemsize) * (2 if add else 1)
    return stream + tokens * size * itemsize * (2 if add else 1) + size * itemsize


def flops(*, tokens: int, size: int, add: bool, **_: int) -> int:
    """Square, sum, scale and weight an element; and add."""
    return tokens * size * (4 + add)


BENCH = (
    Timed(
        "add and norm, 16384 x 4096, residual fp32, bf16",
        {"tokens": 16384, "size": 4096, "add": True, "wide": True},
        goal=0.85,
    ),
    Timed("norm, 65536 x 4096, bf16", {"tokens": 65536, "size": 4096, "add": False, "wide": False}, goal=0.85),
)


def torch_op(x: Tensor, update: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> Callable[[], Tensor]:
    """Addition, then torch's RMSNorm in the dtype of the residual stream."""
    wide = weight.to(x.dtype)

    def norm() -> Tensor:
        if update is not None:
            x.add_(update)
        return F.rms_norm(x, x.shape[-1:], wide, eps).to(out.dtype)

    return norm

"""The gate of a feed-forward network: out = silu(gate) * up, silu(g) = g / (1 + exp(-g)).

Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Generator, Tensor

from minivllm_kernels.gpu.form import Build, Timed, check, check_device, check_dtype, check_rank, power_of_2

MAX_TILE = 1024


def ref(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [T, 2 * inner], the gate first, out [T, inner]. Computed in float32."""
    gate, up = gate_up.float().chunk(2, -1)
    out.copy_(F.silu(gate) * up)


@triton.jit
def kernel(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and tile."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = element < INNER
    gate = tl.load(gate_up + row * 2 * INNER + element, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + element, mask, other=0.0).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * INNER + element, result.to(out.dtype.element_ty), mask)


def launch(gate_up: Tensor, out: Tensor) -> None:
    """As `ref`."""
    tokens, inner = check_rank("out", out, 2)
    where, kind = check_device("gate_up", gate_up), check_dtype("gate_up", gate_up, TOL)
    check("gate_up", gate_up, where, kind, (tokens, 2 * inner))
    check("out", out, where, kind, (tokens, inner))
    tile = min(power_of_2(inner), MAX_TILE)
    kernel[(tokens, triton.cdiv(inner, tile))](gate_up, out, INNER=inner, BLOCK=tile)


WRITES = ("out",)
SIZES = {"tokens": range(5), "inner": range(1, 200)}
CASES = (
    {"tokens": 3, "inner": 77},
    {"tokens": 0, "inner": 64},
    {"tokens": 1, "inner": 1},
    {"tokens": 2, "inner": 1536},
)
FREE: set[tuple[str, int]] = set()
TOL = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def inputs(dtype: torch.dtype, generator: Generator, *, tokens: int, inner: int) -> dict[str, object]:
    """Gates far enough from zero to saturate."""
    gate_up = 8 * torch.randn(tokens, 2 * inner, generator=generator)
    return {"gate_up": gate_up.to(dtype), "out": torch.full((tokens, inner), float("nan"), dtype=dtype)}


AOT = (
    Build(
        "inner size 14336, bf16",
        {"gate_up": "*bf16:16", "out": "*bf16:16"},
        {"INNER": 14336, "BLOCK": 1024},
        {"tokens": 8192, "inner": 14336},
        blocks_per_sm=16,
    ),
)


def bytes_moved(itemsize: int, *, tokens: int, inner: int) -> int:
    """Gate and up are read, the product written."""
    return 3 * tokens * inner * itemsize


def flops(*, tokens: int, inner: int) -> int:
    """Exponential, addition, division and product an element."""
    return 4 * tokens * inner


BENCH = (Timed("16384 tokens, inner size 14336, bf16", {"tokens": 16384, "inner": 14336}, goal=0.85),)


def torch_op(gate_up: Tensor, out: Tensor) -> Callable[[], Tensor]:
    """Two operators: the product of the gate's activation is written and read in between."""
    gate, up = gate_up.chunk(2, -1)
    return lambda: torch.mul(F.silu(gate), up, out=out)

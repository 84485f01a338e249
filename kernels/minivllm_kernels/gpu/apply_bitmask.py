"""Forbid tokens: logits[rows[n], i] = -inf where bit i % 32 of word i // 32 of bitmask[n] is 0.

The layout is xgrammar's and so vLLM's, lowest bit first; requests with a grammar are some rows of a batch, in any order.

Dong et al., "XGrammar: Flexible and Efficient Structured Generation Engine for Large Language Models", 2024.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from minivllm_kernels.gpu.form import Build, Timed, check, check_device, check_dtype, check_rank, power_of_2

WORD = 32
MAX_WORDS = 128


def ref(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """logits [B, V], bitmask int32 [N, ceil(V / 32)], rows int64 [N]."""
    token = torch.arange(logits.shape[1], device=logits.device)
    allowed = (bitmask[:, token // WORD] >> (token % WORD)) & 1
    logits[rows] = logits[rows].masked_fill(allowed == 0, float("-inf"))


@triton.jit
def kernel(logits, bitmask, rows, vocab, words, BLOCK: tl.constexpr):
    """One program a mask row and BLOCK words. Logits are only written: what stays allowed isn't even read."""
    mask_row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bitmask + mask_row * words + word, word < words, other=0)
    bit = tl.arange(0, 32)
    forbidden = ((bits[:, None] >> bit[None, :]) & 1) == 0
    token = word[:, None] * 32 + bit[None, :]
    target = logits + tl.load(rows + mask_row) * vocab + token
    minus_infinity = tl.full([BLOCK, 32], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(target, minus_infinity, forbidden & (token < vocab))


def launch(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """As `ref`. Rows are trusted."""
    batch, vocab = check_rank("logits", logits, 2)
    (count,) = check_rank("rows", rows, 1)
    words = triton.cdiv(vocab, WORD)
    where, kind = check_device("logits", logits), check_dtype("logits", logits, TOL)
    check("logits", logits, where, kind, (batch, vocab))
    check("bitmask", bitmask, where, torch.int32, (count, words))
    check("rows", rows, where, torch.int64, (count,))
    tile = min(power_of_2(words), MAX_WORDS)
    kernel[(count, triton.cdiv(words, tile))](logits, bitmask, rows, vocab, words, BLOCK=tile)


WRITES = ("logits",)
SIZES = {"batch": range(4, 6), "masks": range(5), "vocab": range(1, 200)}
CASES = (
    {"batch": 4, "masks": 3, "vocab": 77},
    {"batch": 4, "masks": 0, "vocab": 64},
    {"batch": 1, "masks": 1, "vocab": 1},
    {"batch": 2, "masks": 2, "vocab": 5000},
)
FREE = {("logits", 0), ("logits", 1)}
TOL = {torch.bfloat16: 0.0, torch.float16: 0.0, torch.float32: 0.0}


def inputs(
    dtype: torch.dtype, generator: Generator, *, batch: int, masks: int, vocab: int, few: bool = False
) -> dict[str, object]:
    """Bits are random, those past the vocabulary too; `few`: of the first word only, and no other token is allowed."""
    words = triton.cdiv(vocab, WORD)
    bitmask = torch.randint(-(2**31), 2**31, (masks, words), generator=generator).to(torch.int32)
    if few:
        bitmask[:, 1:] = 0
    rows = torch.randperm(batch, generator=generator)[:masks]
    return {"logits": torch.randn(batch, vocab, generator=generator).to(dtype), "bitmask": bitmask, "rows": rows}


AOT = (
    Build(
        "vocabulary of 128256, float32",
        {"logits": "*fp32:16", "bitmask": "*i32:16", "rows": "*i64:16", "vocab": "i32:16", "words": "i32:16"},
        {"BLOCK": MAX_WORDS},
        {"batch": 256, "masks": 256, "vocab": 128256},
        blocks_per_sm=8,
        wide_loads=False,
        itemsize=4,
    ),
)


def bytes_moved(itemsize: int, *, masks: int, vocab: int, **_: int) -> int:
    """Masks are read, and all but a handful of logits written."""
    return masks * (vocab * itemsize + triton.cdiv(vocab, WORD) * 4 + 8)


def flops(**_: int) -> int:
    """It computes nothing."""
    return 0


BENCH = (
    Timed(
        "1024 rows of 128256, float32",
        {"batch": 1024, "masks": 1024, "vocab": 128256, "few": True},
        dtype=torch.float32,
    ),
)

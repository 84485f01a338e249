"""A linear layer whose weights have 4 bits: out = x W^T, W[n, k] = scale[g, n] (q[n, k] - zero[g, n]), g = k // group_size.

Weights come out of memory at a quarter of their 16 bits, which is what a few tokens wait for; so they must become numbers
in fewer instructions than memory needs to bring them (an H100: 4.6 a weight). A conversion is too slow. But 1024 + q is
the 16 bits 0x6400 | q in float16, so `and`, `or` (one instruction, lop3) make a number of a nibble, and of two at once where
one lies in each half of 32 bits. Subtracting 1024 + zero leaves q - zero, exactly. The nibble above makes 1024 + 16 q: a
multiplication by 1/16 and a subtraction of 64 + zero, which are one instruction too. That's 1 shift, 4 lop3 and 4 additions
for 8 weights. bfloat16 has 0x4300 | q = 128 + q, and too short a mantissa for the nibble above, so 3 shifts.

Scales multiply a group's sums, in float32: as few multiplications as there are sums, and no rounding of q - zero.

Packed weights: int32 [ceil(K / 128), N, 16], 128 weights of a row in 64 bytes, rows of the same 128 next to each other.
Nibble p (from the least significant) of word i is the weight 32 (p mod 4) + 2 i + p div 4: the halves of a word hold
neighbours, as operands of matrix products have them; and nibbles p and p + 4 of all words are 32 weights in a row, which a
product takes together. If K isn't a multiple of 128, the last weights are padding.

Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models", 2024; Kim et al.,
"Who Says Elephants Can't Run: Bringing Large Scale MoE Models into Cloud Scale Production", 2022 (the float16 numbers).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from minivllm_kernels.gpu.form import Build, Timed, check, check_device, check_dtype, check_rank, dot_dtype

CHUNK = 128
"""Weights of a row that are packed together."""
WORDS = 16
"""32-bit words they are packed in."""
RUN: tl.constexpr = tl.constexpr(32)
"""Consecutive weights that are the same nibble of a chunk's 16-bit halves of words."""
SYMMETRIC: tl.constexpr = tl.constexpr(8)
"""The zero point where none is given: the middle of 0 to 15."""
BLOCK_N = 64
"""Outputs of a program: the rows of its products, and Hopper's warp groups multiply no fewer."""


def order() -> Tensor:
    """Which of a chunk's weights each nibble is: int64 [16, 8], word and nibble, least significant first."""
    word, nibble = torch.arange(WORDS)[:, None], torch.arange(8)
    return RUN.value * (nibble % 4) + 2 * word + nibble // 4


def pack(weights: Tensor) -> Tensor:
    """Integers [N, K] from 0 to 15, of any integer dtype -> int32 [ceil(K / 128), N, 16]. Padding is zero."""
    rows, depth = weights.shape
    if weights.numel() and not weights.is_meta and not 0 <= int(weights.min()) <= int(weights.max()) <= 15:
        raise ValueError(f"weights: {int(weights.min())} to {int(weights.max())} don't fit in 4 bits, must be 0 to 15")
    padded = torch.nn.functional.pad(weights.long(), (0, -depth % CHUNK))
    nibbles = padded.view(rows, -1, CHUNK)[:, :, order().to(weights.device)]
    shifts = 4 * torch.arange(8, device=weights.device)
    return (nibbles << shifts).sum(-1).to(torch.int32).transpose(0, 1).contiguous()


def unpack(packed: Tensor, depth: int) -> Tensor:
    """What `pack` packed: int32 [C, N, 16] -> int32 [N, K], K = `depth`."""
    chunks, rows, _ = packed.shape
    nibbles = (packed[..., None] >> (4 * torch.arange(8, device=packed.device))) & 15
    places = order().flatten().argsort().to(packed.device)
    weights = nibbles.view(chunks, rows, CHUNK)[:, :, places]
    return weights.transpose(0, 1).reshape(rows, chunks * CHUNK)[:, :depth].int()


def ref(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor, group_size: int) -> None:
    """x [M, K]; packed int32 [ceil(K / 128), N, 16] as `pack` makes it; scales [K / group_size, N]; zeros int8 of the same
    shape, or None: 8; out [M, N]. Computed in float32."""
    out.copy_(x.float() @ dequantise(packed, scales, zeros, group_size, x.shape[1]).T)


def dequantise(packed: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, depth: int) -> Tensor:
    """The weights as they are meant, float32 [N, K]."""
    zero = torch.full_like(scales, SYMMETRIC.value) if zeros is None else zeros
    zero_of, scale_of = (each.float().T.repeat_interleave(group_size, 1) for each in (zero, scales))
    return (unpack(packed, depth).float() - zero_of) * scale_of


HALF_PTX = """{
.reg .b32 upper, number, sixteenth;
mov.b32 sixteenth, 0x2c002c00;
shr.u32 upper, $4, 8;
lop3.b32 number, $4, 0x000f000f, 0x64006400, 0xea;
sub.f16x2 $0, number, $5;
lop3.b32 number, $4, 0x00f000f0, 0x64006400, 0xea;
fma.rn.f16x2 $1, number, sixteenth, $6;
lop3.b32 number, upper, 0x000f000f, 0x64006400, 0xea;
sub.f16x2 $2, number, $5;
lop3.b32 number, upper, 0x00f000f0, 0x64006400, 0xea;
fma.rn.f16x2 $3, number, sixteenth, $6;
}"""
"""Float16: two halves of a word to four pairs of numbers ($0 to $3). $4 is the word, $5 1024 + zero, $6 -(64 + zero), each
twice. lop3's last number says which function of three bits: 0xea is (a & b) | c."""

BRAIN_PTX = """{
.reg .b32 upper, number, one;
mov.b32 one, 0x3f803f80;
lop3.b32 number, $4, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, number, one, $6;
shr.u32 upper, $4, 4;
lop3.b32 number, upper, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $1, number, one, $6;
shr.u32 upper, $4, 8;
lop3.b32 number, upper, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $2, number, one, $6;
shr.u32 upper, $4, 12;
lop3.b32 number, upper, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $3, number, one, $6;
}"""
"""The same for bfloat16; $6 is -(128 + zero), $5 isn't used. Before Hopper, it adds only as part of a multiplication."""

HALF_ASM = tl.constexpr(HALF_PTX)
BRAIN_ASM = tl.constexpr(BRAIN_PTX)
CONSTRAINTS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")
"""Four results, written before the last argument is read; three arguments; each two numbers in 32 bits."""


@triton.jit
def by_conversion(halves, zero, NIBBLE: tl.constexpr, DOT: tl.constexpr):
    """A nibble of each 16 bits, less the zero point, converted: v1."""
    return (((halves >> (4 * NIBBLE)) & 15) - zero).to(DOT)


@triton.jit
def by_magic(halves, zero, NIBBLE: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr):
    """The same without a conversion of an integer weight: bits of a number, one 16 bits at a time. v2."""
    if KIND.is_bf16():
        bits = ((halves >> (4 * NIBBLE)) & 0x0F) | 0x4300
        return bits.to(KIND, bitcast=True).to(DOT) - (128 + zero).to(DOT)
    elif NIBBLE % 2 == 0:
        bits = ((halves >> (4 * NIBBLE)) & 0x0F) | 0x6400
        return bits.to(KIND, bitcast=True).to(DOT) - (1024 + zero).to(DOT)
    else:
        bits = ((halves >> (4 * NIBBLE - 4)) & 0xF0) | 0x6400
        return bits.to(KIND, bitcast=True).to(DOT) * 0.0625 - (64 + zero).to(DOT)


@triton.jit
def by_lop3(halves, zero, KIND: tl.constexpr):
    """All four nibbles of each 16 bits, two 16 bits at once: `pack=2` puts two of a thread's into a register."""
    if KIND.is_bf16():
        added = (-(128 + zero)).to(KIND)
        return tl.inline_asm_elementwise(
            BRAIN_ASM,
            CONSTRAINTS,
            [halves, added, added],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            HALF_ASM,
            CONSTRAINTS,
            [halves, (1024 + zero).to(KIND), (-(64 + zero)).to(KIND)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def kernel(
    x, packed, scales, zeros, out, x_stride, tokens, outputs, depth,
    GROUP: tl.constexpr, METHOD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program BLOCK_N outputs of BLOCK_M tokens. Weights are the left operand, which tensor cores take from registers,
    where they were made; so the result is transposed. `packed` is seen as 16-bit halves of words, 32 a chunk. METHOD is
    how weights are made: "conversion", "magic" or "lop3". DOT is the dtype of what matrix products multiply."""
    KIND: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_mask = n < outputs
    half = tl.arange(0, RUN)
    width = tl.cast(outputs, tl.int64)
    x_row = x + token.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, depth, 4 * RUN):
        row = first // 4 * width + n * RUN
        halves = tl.load(packed + row[:, None] + half[None, :], n_mask[:, None], other=0)
        partial = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        zero = tl.full([BLOCK_N, 1], SYMMETRIC, tl.int16)
        for nibble in tl.static_range(4):
            start = first + nibble * RUN
            group_row = start // GROUP * width
            group_mask = n < tl.where(start < depth, outputs, 0)
            if zeros is not None and nibble * RUN % GROUP == 0:
                zero = tl.load(zeros + group_row + n, group_mask, other=0).to(tl.int16)[:, None]
            if METHOD == "conversion":
                weights = by_conversion(halves, zero, nibble, DOT)
            elif METHOD == "magic":
                weights = by_magic(halves, zero, nibble, KIND, DOT)
            else:
                weights = by_lop3(halves, zero, KIND)[nibble]
            k = start + half[None, :]
            x_tile = tl.load(x_row + k, (token[:, None] < tokens) & (k < depth), other=0.0).to(DOT)
            partial = tl.dot(weights, tl.trans(x_tile), partial, input_precision="ieee")
            if nibble == 3 or (nibble + 1) * RUN % GROUP == 0:
                scale = tl.load(scales + group_row + n, group_mask, other=0.0).to(tl.float32)
                acc += partial * scale[:, None]
                partial = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    target = out + token[None, :] * width + n[:, None]
    tl.store(target, acc.to(KIND), n_mask[:, None] & (token[None, :] < tokens))


def launch(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor, group_size: int) -> None:
    """As `ref`. Rows of x may lie apart. Zero points are trusted to be 0 to 15.

    No program shares its sums with another: few tokens and few outputs leave multiprocessors idle.
    """
    # the interpreter can't run PTX
    run("magic" if triton.knobs.runtime.interpret else "lop3", x, packed, scales, zeros, out, group_size)


def v1(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor, group_size: int) -> None:
    """Fixes nothing yet: weights cross memory at 4 bits. Each is shifted, masked and converted, a conversion running at a
    fraction of an addition's rate, so that making weights may take longer than loading them."""
    run("conversion", x, packed, scales, zeros, out, group_size)


def v2(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor, group_size: int) -> None:
    """Fixes the conversion: a nibble becomes a number by `or`. But this is said of 16 bits at a time. Compiled for Hopper,
    most are paired all the same, with moves and permutations of halves; the PTX of `launch` needs none."""
    run("magic", x, packed, scales, zeros, out, group_size)


LADDER = (v1, v2)


def run(
    method: str, x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor, group_size: int
) -> None:
    """Check the arguments, then multiply with weights made by this method."""
    tokens, depth = check_rank("x", x, 2)
    _, outputs, _ = check_rank("packed", packed, 3)
    where, kind = check_device("x", x), check_dtype("x", x, TOL)
    check_group(group_size, depth)
    check("x", x, where, kind, (tokens, depth), rows=1)
    check("packed", packed, where, torch.int32, (triton.cdiv(depth, CHUNK), outputs, WORDS))
    check("scales", scales, where, kind, (depth // group_size, outputs))
    if zeros is not None:
        check("zeros", zeros, where, torch.int8, (depth // group_size, outputs))
    check("out", out, where, kind, (tokens, outputs))
    tile = tile_tokens(tokens)
    grid = (triton.cdiv(outputs, BLOCK_N), triton.cdiv(tokens, tile))
    kernel[grid](
        x, packed.view(torch.int16), scales, zeros, out, x.stride(0), tokens, outputs, depth,
        GROUP=group_size, METHOD=method, BLOCK_M=tile, BLOCK_N=BLOCK_N, DOT=dot_dtype(kind),
    )  # fmt: skip


def tile_tokens(tokens: int) -> int:
    """Tokens of a program: few when there are few, for decoding, and enough to use a weight often when there are many."""
    return 16 if tokens <= 16 else 64


def check_group(group_size: int, depth: int) -> None:
    """Raise `ValueError` unless weights can be in groups of this size: a chunk's 32, 64 or all 128, or several chunks."""
    if group_size not in (32, 64) and (group_size < CHUNK or group_size % CHUNK):
        raise ValueError(f"group_size: {group_size} must be 32, 64 or a multiple of {CHUNK}")
    if depth % group_size:
        raise ValueError(f"group_size: {group_size} doesn't divide the {depth} inputs of x")


WRITES = ("out",)
SIZES = {
    "tokens": (0, 1, 3, 17), "outputs": (1, 5, 64, 70), "groups": (1, 2, 3), "group_size": (32, 64, 128, 256), "with_zeros": (False, True),
}  # fmt: skip
CASES = (
    {"tokens": 3, "outputs": 70, "groups": 5, "group_size": 32, "with_zeros": True},
    {"tokens": 17, "outputs": 5, "groups": 3, "group_size": 64, "with_zeros": True},
    {"tokens": 0, "outputs": 8, "groups": 1, "group_size": 128, "with_zeros": False},
    {"tokens": 1, "outputs": 1, "groups": 2, "group_size": 128, "with_zeros": False},
    {"tokens": 2, "outputs": 3, "groups": 2, "group_size": 256, "with_zeros": True},
)
FREE: set[tuple[str, int]] = set()
TOL = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""The rounding of the result, twice. Weights aren't rounded: neither in `ref` nor by the kernel."""


def inputs(
    dtype: torch.dtype,
    generator: Generator,
    *,
    tokens: int,
    outputs: int,
    groups: int,
    group_size: int,
    with_zeros: bool,
) -> dict[str, object]:
    """Sums are about 1, groups' scales are a factor apart. Padding of the last chunk is 15, which no zero point removes."""
    depth = groups * group_size
    chunks = -(-depth // CHUNK)
    words = torch.randint(-(2**31), 2**31, (chunks, outputs, WORDS), generator=generator).to(torch.int32)
    padding = pack(15 * (torch.arange(chunks * CHUNK) >= depth).int()[None])
    x = torch.randn(tokens, depth + 8, generator=generator).to(dtype)
    scales = (0.5 + torch.rand(groups, outputs, generator=generator)) / (4 * depth**0.5)
    zeros = torch.randint(0, 16, (groups, outputs), generator=generator).to(torch.int8)
    x[:, depth:] = float("nan")
    return {
        "x": x[:, :depth],
        "packed": words | padding,
        "scales": scales.to(dtype),
        "zeros": zeros if with_zeros else None,
        "out": torch.full((tokens, outputs), float("nan"), dtype=dtype),
        "group_size": group_size,
    }


def build(kind: tl.dtype, tokens: int, with_zeros: bool, blocks_per_sm: int) -> Build:
    """4096 inputs, 14336 outputs, groups of 128."""
    zeros = {"zeros": "*i8:16"} if with_zeros else {}
    return Build(
        f"{tokens} by 4096 to 14336, g128{', zeros' if with_zeros else ''}, {kind.name}",
        {"x": f"*{kind.name}:16", "packed": "*i16:16", "scales": f"*{kind.name}:16", "out": f"*{kind.name}:16"}
        | {"x_stride": "i32:16", "tokens": "i32", "outputs": "i32:16", "depth": "i32:16"}
        | zeros,
        {"GROUP": 128, "METHOD": "lop3", "BLOCK_M": tile_tokens(tokens), "BLOCK_N": BLOCK_N, "DOT": kind}
        | ({} if with_zeros else {"zeros": None}),
        {"tokens": tokens, "outputs": 14336, "groups": 32, "group_size": 128, "with_zeros": with_zeros},
        blocks_per_sm=blocks_per_sm,
        matrix="wgmma",
        not_on={
            75: "it has no bfloat16, and Triton no tensor-core instruction for its float16, whose scalar code takes 255 registers"
        },
    )


AOT = (
    build(tl.float16, 16, with_zeros=False, blocks_per_sm=8),
    build(tl.bfloat16, 16, with_zeros=True, blocks_per_sm=8),
    build(tl.float16, 512, with_zeros=False, blocks_per_sm=4),
    build(tl.bfloat16, 512, with_zeros=True, blocks_per_sm=4),
)


def bytes_moved(itemsize: int, *, tokens: int, outputs: int, groups: int, group_size: int, with_zeros: bool) -> int:
    """Inputs and outputs, half a byte a weight, a scale a group and its zero point's byte."""
    weights = groups * outputs * (group_size // 2 + itemsize + (1 if with_zeros else 0))
    return weights + tokens * (groups * group_size + outputs) * itemsize


def flops(*, tokens: int, outputs: int, groups: int, group_size: int, **_: bool) -> int:
    """A multiplication and an addition a weight and token."""
    return 2 * tokens * outputs * groups * group_size


def timed(tokens: int, dtype: torch.dtype, with_zeros: bool, goal: float | None, ceiling: str = "copy") -> Timed:
    """Gate and up of a 70B model: 8192 inputs, 57344 outputs, groups of 128."""
    return Timed(
        f"{tokens} by 8192 to 57344, g128{', zeros' if with_zeros else ''}, {str(dtype).removeprefix('torch.')}",
        {"tokens": tokens, "outputs": 57344, "groups": 64, "group_size": 128, "with_zeros": with_zeros},
        goal,
        ceiling,
        dtype,
    )


BENCH = (
    timed(16, torch.float16, with_zeros=False, goal=0.7),
    timed(1, torch.float16, with_zeros=False, goal=0.7),
    timed(16, torch.bfloat16, with_zeros=True, goal=0.7),
    timed(512, torch.float16, with_zeros=False, goal=None, ceiling="matmul"),
)


def torch_op(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor, group_size: int
) -> Callable[[], Tensor]:
    """torch's product with the same weights in x's dtype: four times the bytes. Making them isn't timed."""
    wide = dequantise(packed, scales, zeros, group_size, x.shape[1]).to(x.dtype)
    return lambda: x @ wide.T

"""The block formats of GGUF tensors, decoded to float32.

A quantised row is a run of blocks. A block of 32 weights ("_0", "_1") has one float16 scale; a block of 256 ("_K") has
a float16 scale over eight or sixteen small integer scales, which buys finer groups for fewer bits. Formats ending in _0
and Q6_K are symmetric (weight = scale * q), the others have an offset as well.
Layout: `block_q4_0` .. `block_q6_K` in ggml's ggml-common.h; arithmetic: `dequantize_row_*` in ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NAMES_OF_OTHER_TYPES = {10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
                        21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
                        29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One tensor type: `block_elements` weights in `block_bytes` bytes; `decode` takes uint8 blocks [N, block_bytes]
    and returns float32 [N, block_elements]."""

    name: str
    block_elements: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]

    def num_bytes(self, elements: int) -> int:
        """Bytes of a tensor of `elements` weights, a multiple of the block."""
        return elements // self.block_elements * self.block_bytes


def type_name(kind: int) -> str:
    """The name of a ggml tensor type id, also of those that can't be decoded here."""
    form = BLOCK_FORMATS.get(kind)
    return form.name if form else NAMES_OF_OTHER_TYPES.get(kind, f"type {kind}")


def dequantize_q4_0(blocks: Tensor) -> Tensor:
    """18 bytes: float16 scale, 16 bytes of nibbles. uint8 [N, 18] -> float32 [N, 32]; weight = scale * (q - 8)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:18]) - 8)


def dequantize_q4_1(blocks: Tensor) -> Tensor:
    """20 bytes: float16 scale, float16 minimum, 16 bytes of nibbles. uint8 [N, 20] -> float32 [N, 32]; scale * q + minimum."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:20]) + _half(blocks, 2)


def dequantize_q5_0(blocks: Tensor) -> Tensor:
    """22 bytes: float16 scale, 32 fifth bits, 16 bytes of nibbles. uint8 [N, 22] -> float32 [N, 32]; scale * (q - 16)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 6:22]) + 16 * _bits(blocks[:, 2:6]) - 16)


def dequantize_q5_1(blocks: Tensor) -> Tensor:
    """24 bytes: float16 scale and minimum, 32 fifth bits, 16 bytes of nibbles. uint8 [N, 24] -> float32 [N, 32]."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:24]) + 16 * _bits(blocks[:, 4:8])) + _half(blocks, 2)


def dequantize_q8_0(blocks: Tensor) -> Tensor:
    """34 bytes: float16 scale, 32 int8. uint8 [N, 34] -> float32 [N, 32]; weight = scale * q."""
    return _half(blocks, 0) * _int8(blocks[:, 2:34])


def dequantize_q4_k(blocks: Tensor) -> Tensor:
    """Decode Q4_K: 8 sub-blocks of 32 weights, each with its own 6-bit scale and minimum. uint8 [N, 144] -> float32 [N, 256].

    Bytes: 0-1 float16 scale of scales, 2-3 float16 scale of minimums, 4-15 the sixteen 6-bit numbers (`scales_and_minimums`),
    16-143 nibbles: of each 32 bytes the low nibbles are one sub-block and the high nibbles the next.
    weight = scale * sub_scale * q - min_scale * sub_minimum: the minimum is subtracted.
    """
    scales, minimums = _sub_scales(blocks)
    quants = _nibbles(blocks[:, 16:144], run=32).view(-1, 8, 32)
    return (scales * quants - minimums).view(-1, 256)


def dequantize_q5_k(blocks: Tensor) -> Tensor:
    """Decode Q5_K: as Q4_K with a fifth bit. uint8 [N, 176] -> float32 [N, 256].

    Bytes 0-15 as in Q4_K, 16-47 the fifth bits (bit s of byte i belongs to weight i of sub-block s), 48-175 nibbles.
    """
    scales, minimums = _sub_scales(blocks)
    fifth = (blocks[:, None, 16:48] >> _shifts(8)) & 1
    quants = _nibbles(blocks[:, 48:176], run=32).view(-1, 8, 32) + 16 * fifth
    return (scales * quants - minimums).view(-1, 256)


def dequantize_q6_k(blocks: Tensor) -> Tensor:
    """Decode Q6_K: 16 sub-blocks of 16 weights, each with an int8 scale. uint8 [N, 210] -> float32 [N, 256].

    Bytes: 0-127 low nibbles (of each 64 bytes the low nibbles first), 128-191 upper two bits (of each 32 bytes, bits 0-1
    are for the first 32 weights, 2-3 for the next ..), 192-207 int8 scales, 208-209 float16 scale.
    weight = scale * sub_scale * (q - 32).
    """
    low = _nibbles(blocks[:, 0:128], run=64).view(-1, 2, 128)
    upper = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(4, step=2)) & 3
    quants = (low + 16 * upper.view(-1, 2, 128) - 32).view(-1, 16, 16)
    scales = _half(blocks, 208) * _int8(blocks[:, 192:208])
    return (scales[:, :, None] * quants).view(-1, 256)


def scales_and_minimums(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the sixteen 6-bit numbers of Q4_K and Q5_K: uint8 [N, 12] -> uint8 [N, 8] scales and [N, 8] minimums.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minimums 0-3 in their low 6 bits. Numbers 4-7 are split: their low 4 bits lie
    in bytes 8-11 (scale in the low nibble, minimum in the high), their upper 2 bits in the top of bytes 0-3 and 4-7.
    """
    scale_bytes, minimum_bytes, rest = packed.split(4, dim=1)
    scales = torch.cat([scale_bytes & 63, (rest & 15) | (scale_bytes >> 6 << 4)], dim=1)
    minimums = torch.cat([minimum_bytes & 63, (rest >> 4) | (minimum_bytes >> 6 << 4)], dim=1)
    return scales, minimums


def _sub_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, 8, 1] scales and minimums of the sub-blocks, from the first 16 bytes of a Q4_K or Q5_K block."""
    scales, minimums = scales_and_minimums(blocks[:, 4:16])
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minimums)[:, :, None]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _int8(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int8).float()


def _nibbles(raw: Tensor, run: int = 16) -> Tensor:
    """Nibbles of each `run` bytes, first all the low ones, then all the high ones: uint8 [N, B] -> float32 [N, 2B]."""
    rows = raw.reshape(len(raw), -1, run)
    return torch.stack([rows & 15, rows >> 4], dim=2).view(len(raw), -1).float()


def _bits(raw: Tensor) -> Tensor:
    """Bits of each byte, lowest first: uint8 [N, B] -> float32 [N, 8B]."""
    return ((raw[:, :, None] >> _shifts(8).view(1, 1, 8)) & 1).view(len(raw), -1).float()


def _shifts(count: int, step: int = 1) -> Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8)[:, None]


def _unquantised(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.view(dtype).float()


BLOCK_FORMATS = {
    0: BlockFormat("F32", 1, 4, _unquantised(torch.float32)),
    1: BlockFormat("F16", 1, 2, _unquantised(torch.float16)),
    30: BlockFormat("BF16", 1, 2, _unquantised(torch.bfloat16)),
    2: BlockFormat("Q4_0", 32, 18, dequantize_q4_0),
    3: BlockFormat("Q4_1", 32, 20, dequantize_q4_1),
    6: BlockFormat("Q5_0", 32, 22, dequantize_q5_0),
    7: BlockFormat("Q5_1", 32, 24, dequantize_q5_1),
    8: BlockFormat("Q8_0", 32, 34, dequantize_q8_0),
    12: BlockFormat("Q4_K", 256, 144, dequantize_q4_k),
    13: BlockFormat("Q5_K", 256, 176, dequantize_q5_k),
    14: BlockFormat("Q6_K", 256, 210, dequantize_q6_k),
}

"""calc-02 · What paging wastes: the engine's own answer, cut from it. Do not edit."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.course import solves


@solves("minivllm.calc.memory:paged_waste")
def paged_waste(lens: Sequence[int], block_size: int) -> int:
    """Token slots allocated but unused when sequences of these lengths are kept in blocks of `block_size` slots.

    A sequence fills its blocks in order, so only its last block can be partial: it wastes at most block_size - 1 slots,
    and none when its length is a multiple of `block_size`. A sequence of length 0 holds no block.
    Raises `ValueError` if `block_size` is less than 1 or a length is negative.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be at least 1")
    if any(length < 0 for length in lens):
        raise ValueError(f"lens={list(lens)}: lengths must not be negative")
    return sum(-length % block_size for length in lens)

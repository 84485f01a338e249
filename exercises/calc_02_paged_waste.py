"""calc-02 · What paging wastes · chapter 3 · about 10 minutes · 5 points

Replace each `raise NotImplementedError`. Signature and docstring are the contract; everything that they allow is right.
Add helpers and imports as you like; keep the names and the @solves marks.

    1  the last block lacks what its sequence doesn't fill
    2  a full block wastes nothing, and no token needs no block
    1  sizes and lengths that make no sense are refused
    1  for any lengths, used and wasted slots make whole blocks, and no block is only waste

Grade it:  python -m minivllm.course.grade calc-02          (--hint for a hint)
"""
# cut from the engine: 18c17bf17c65f0b2

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
    raise NotImplementedError("calc-02: paged_waste")

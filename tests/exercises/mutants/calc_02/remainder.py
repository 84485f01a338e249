"""Returns the slots used of the last block, not those unused."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.course import solves


@solves("minivllm.calc.memory:paged_waste")
def paged_waste(lens: Sequence[int], block_size: int) -> int:
    if block_size < 1 or any(length < 0 for length in lens):
        raise ValueError("block_size must be at least 1 and lengths not negative")
    return sum(length % block_size for length in lens)

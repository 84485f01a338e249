"""The ranks of tensor parallelism as threads of this process: what `runner/parallel.py:Group` promises, without sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result")


class ThreadGroup:
    """`size` ranks; `num_sums[rank]` counts the sums that a rank took part in."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_sums = [0] * size
        self._parts: list[Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def all_reduce(self, rank: int, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in its place."""
        self.num_sums[rank] += 1
        self._parts[rank] = x.clone()
        self._barrier.wait()
        x.copy_(sum(self._parts))
        self._barrier.wait()
        return x

    def run(self, work: Callable[[int, Callable[[Tensor], Tensor]], Result]) -> list[Result]:
        """`work(rank, all_reduce)` at every rank at once; the results by rank. One that raises ends all."""

        def rank_work(rank: int) -> Result:
            try:
                return work(rank, partial(self.all_reduce, rank))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(rank_work, range(self.size)))

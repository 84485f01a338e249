"""How much work a call does, counted and not timed: for graders where the cost is the point.

Counted are the bytecodes that run, wherever they are; comparisons of objects made by `counted` (which is how
`list.remove` and `in` look through a list without running any bytecode); and memory taken while the call runs, at 8 bytes
a unit (which is how copying a list shows). A call of constant cost counts about the same for small and large structures.
"""

from __future__ import annotations

import statistics
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_comparisons = 0


def counted(kind: type) -> type:
    """A subclass whose objects are equal only to themselves, and count it when they are compared."""

    def __eq__(self: object, other: object) -> bool:
        global _comparisons
        _comparisons += 1
        return self is other

    def __hash__(self: object) -> int:
        return id(self) // 16

    return type(kind.__name__, (kind,), {"__slots__": (), "__eq__": __eq__, "__hash__": __hash__})


def work(call: Callable[[], object]) -> int:
    """Units of work that one call does."""
    global _comparisons
    _comparisons = steps = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    old = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(old)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return steps + _comparisons + max(peak - before, 0) // 8


def typical_work(calls: Iterable[Callable[[], object]]) -> float:
    """The median over several calls: now and then a structure may tidy up at some cost."""
    return statistics.median(work(call) for call in calls)

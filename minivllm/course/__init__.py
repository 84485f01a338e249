"""Course tools: size table, exercises, grading, the book."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def solves(hole: str) -> Callable[[T], T]:
    """Say which function or class of the engine the one below stands for: `@solves("module:qualified.name")`.

    A mark only: it returns what it decorates. `minivllm.course.splice` reads it from the source.
    """
    return lambda thing: thing

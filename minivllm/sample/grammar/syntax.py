"""What patterns and schemas are translated to: a regular language written as a small tree.

A tree may share branches (a schema's definition that is used twice is one branch): it is only ever read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

Ranges = tuple[tuple[int, int], ...]
"""Code points as (first, last), ascending and apart."""

UNICODE: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""All characters: surrogates are none, UTF-8 has no bytes for them."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of a set, in UTF-8."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """All parts, one after the other; without parts the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Any one of the options; without options nothing at all matches."""

    options: tuple[Node, ...]


EMPTY = Seq(())


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` items (None: any number), with the separator between each two."""

    item: Node
    low: int
    high: int | None
    separator: Node = EMPTY


@dataclass(frozen=True, slots=True)
class Selection:
    """Items (what, whether it must be there) in order, with the separator between each two that are there."""

    items: tuple[tuple[Node, bool], ...]
    separator: Node


Node = Chars | Seq | Alt | Repeat | Selection


def concat(*parts: Node | str) -> Node:
    """The parts, one after the other; a text stands for its characters."""
    nodes = ([Chars(((ord(c),) * 2,)) for c in part] if isinstance(part, str) else [part] for part in parts)
    return Seq(tuple(chain.from_iterable(nodes)))


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All characters that are in none of `ranges`, which may overlap and come in any order."""
    gaps, begin = [], 0
    for first, last in sorted([*ranges, (0xD800, 0xDFFF)]):
        if begin < first:
            gaps.append((begin, first - 1))
        begin = max(begin, last + 1)
    return (*gaps, (begin, 0x10FFFF)) if begin <= 0x10FFFF else tuple(gaps)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    return complement(complement(a) + complement(b))

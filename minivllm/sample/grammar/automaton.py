"""From a tree to a deterministic automaton over bytes, within a budget.

The tree becomes an automaton that may be in several states at once (Thompson, "Regular expression search algorithm",
1968), and sets of its states become the states of one that is only ever in one (Rabin and Scott, 1959). Both can
explode: `(a?){1000}` within `{1000}` in the first step, `(a|b)*a(a|b){30}` in the second. Both are counted, and what
goes over the budget is refused, so that no pattern can keep a thread busy for long.

Bytes that no edge tells apart form a class, and the table has a column a class: a schema's has 30 to 60 of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from minivllm.sample.grammar.syntax import Alt, Chars, Node, Ranges, Repeat, Selection, Seq, intersection

MAX_PARTS = 200_000
MAX_STATES = 20_000
MAX_STEPS = 5_000_000
DEAD, START = 0, 1

ByteRange = tuple[int, int]


class TooLargeError(ValueError):
    """The automaton would be over budget."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """A deterministic automaton over bytes.

    `table[state, class_of[byte]]` is the next state: `table` int32 [states, classes], `class_of` uint8 [256].
    `accepting` is bool [states]. State 0 is the dead one, from which nothing leads away; state 1 is where texts start.
    """

    table: NDArray[np.int32]
    class_of: NDArray[np.uint8]
    accepting: NDArray[np.bool_]

    def run(self, text: bytes, state: int = START) -> int:
        """The state after `text`."""
        for byte in text:
            state = int(self.table[state, self.class_of[byte]])
        return state

    def matches(self, text: bytes) -> bool:
        """Whether the whole of `text` is in the language."""
        return bool(self.accepting[self.run(text)])


def build_automaton(node: Node) -> Automaton:
    """The automaton of a tree's language. Raises `TooLargeError` for one over budget."""
    nfa = NFA()
    start, end = nfa.add_state(), nfa.add_state()
    nfa.build(node, start, end)
    return Determiniser(nfa, start, end).run()


class NFA:
    """Edges over byte ranges, and silent edges. A language is built between two given states.

    Nothing that `build` adds leads into its start or out of its end, unless they are one: so parts can share them.
    """

    def __init__(self) -> None:
        self.edges: list[list[tuple[ByteRange, int]]] = []
        self.silent: list[list[int]] = []
        self._parts = 0

    def add_state(self) -> int:
        self._count()
        self.edges.append([])
        self.silent.append([])
        return len(self.edges) - 1

    def link(self, start: int, end: int, over: ByteRange | None = None) -> None:
        """Add an edge over a byte range, or a silent one."""
        self._count()
        if over is None:
            self.silent[start].append(end)
        else:
            self.edges[start].append((over, end))

    def _count(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise TooLargeError(f"it needs over {MAX_PARTS:,} states and edges")

    def build(self, node: Node, start: int, end: int) -> None:
        """Add all of the node's texts as ways from `start` to `end`."""
        match node:
            case Chars(ranges):
                self._build_characters(ranges, start, end)
            case Seq(parts):
                self._build_sequence(parts, start, end)
            case Alt(options):
                for option in options:
                    self.build(option, start, end)
            case Repeat():
                self._build_repeat(node, start, end)
            case Selection():
                self._build_selection(node, start, end)

    def _build_characters(self, ranges: Ranges, start: int, end: int) -> None:
        """Ways over the UTF-8 of each character; those that end alike share the states of their ends."""
        shared: dict[tuple[ByteRange, ...], int] = {(): end}
        for path in utf8_paths(ranges):
            for length in range(1, len(path)):
                rest = path[-length:]
                if rest not in shared:
                    shared[rest] = self.add_state()
                    self.link(shared[rest], shared[rest[1:]], rest[0])
            self.link(start, shared[path[1:]], path[0])

    def _build_sequence(self, parts: tuple[Node, ...], start: int, end: int) -> None:
        if not parts:
            self.link(start, end)
            return
        inner = [self.add_state() for _ in parts[1:]]
        for part, (left, right) in zip(parts, pairwise([start, *inner, end]), strict=True):
            self.build(part, left, right)

    def _build_repeat(self, node: Repeat, start: int, end: int) -> None:
        """A chain of items; if there is no upper bound the last one leads back to its own beginning."""
        if node.low == 0:
            self.link(start, end)
        last = max(node.low, 1) if node.high is None else node.high
        before = start
        for number in range(1, last + 1):
            first, after = self.add_state(), self.add_state()
            if number == 1:
                self.link(before, first)
            else:
                self.build(node.separator, before, first)
            self.build(node.item, first, after)
            if number >= node.low:
                self.link(after, end)
            before = after
        if node.high is None:
            self.build(node.separator, after, first)

    def _build_selection(self, node: Selection, start: int, end: int) -> None:
        """Two tracks past the items: while none was there yet, and after one, when a separator must come first."""
        none, some = start, self.add_state()
        for item, required in node.items:
            first, next_none, next_some = self.add_state(), self.add_state(), self.add_state()
            self.link(none, first)
            self.build(node.separator, some, first)
            self.build(item, first, next_some)
            if not required:
                self.link(none, next_none)
                self.link(some, next_some)
            none, some = next_none, next_some
        self.link(none, end)
        self.link(some, end)


class Determiniser:
    """Sets of NFA states as states of a deterministic automaton, found breadth first from the start."""

    def __init__(self, nfa: NFA, start: int, end: int) -> None:
        self._nfa, self._start, self._end = nfa, start, end
        self._class_of, self._num_classes = byte_classes(byte for edges in nfa.edges for byte, _ in edges)
        self._moves = [[(self._classes(over), target) for over, target in edges] for edges in nfa.edges]
        self._numbers: dict[frozenset[int], int] = {frozenset(): DEAD}
        self._after: dict[frozenset[int], int] = {}
        self._found: list[frozenset[int]] = [frozenset()]
        self._steps = 0

    def _classes(self, over: ByteRange) -> range:
        return range(self._class_of[over[0]], self._class_of[over[1]] + 1)

    def run(self) -> Automaton:
        self._number(frozenset([self._start]))
        table: list[list[int]] = []
        for states in self._found:  # grows while it is walked
            table.append(self._row(states))
        return Automaton(
            np.array(table, dtype=np.int32).reshape(len(table), self._num_classes),
            np.array(self._class_of, dtype=np.uint8),
            np.array([self._end in states for states in self._found]),
        )

    def _row(self, states: frozenset[int]) -> list[int]:
        targets: dict[int, set[int]] = {}
        for state in states:
            for classes, target in self._moves[state]:
                self._spend(len(classes))
                for number in classes:
                    targets.setdefault(number, set()).add(target)
        row = [DEAD] * self._num_classes
        for number, reached in targets.items():
            row[number] = self._number(frozenset(reached))
        return row

    def _number(self, reached: frozenset[int]) -> int:
        """The number of the state that holds all that is silently reached from these, new or known."""
        if reached not in self._after:
            closed = self._close(reached)
            if closed not in self._numbers:
                if len(self._found) == MAX_STATES:
                    raise TooLargeError(f"it needs over {MAX_STATES:,} states")
                self._numbers[closed] = len(self._found)
                self._found.append(closed)
            self._after[reached] = self._numbers[closed]
        return self._after[reached]

    def _close(self, states: frozenset[int]) -> frozenset[int]:
        """All states reached over silent edges; of those kept that have other edges, and the two ends."""
        seen, todo = set(states), list(states)
        while todo:
            for target in self._nfa.silent[todo.pop()]:
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        self._spend(len(seen))
        return frozenset(state for state in seen if self._moves[state] or state in (self._start, self._end))

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise TooLargeError(f"it takes over {MAX_STEPS:,} steps to build")


def byte_classes(ranges: Iterable[ByteRange]) -> tuple[list[int], int]:
    """The class of each of the 256 bytes and the number of classes: bytes that every range holds or leaves out together.

    Classes are numbered as the bytes ascend, so a range of bytes is a range of classes.
    """
    begins = {edge for low, high in set(ranges) for edge in (low, high + 1)}
    class_of, number = [], 0
    for byte in range(256):
        number += byte > 0 and byte in begins
        class_of.append(number)
    return class_of, number + 1


def utf8_paths(ranges: Ranges) -> Iterator[tuple[ByteRange, ...]]:
    """The UTF-8 of sets of characters as byte ranges: any choice of one byte from each range of a path is a character.

    Source: Russ Cox, "Regular expression matching in the wild", 2010, and Rust's `utf8-ranges`.
    """
    for length_class in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
        for first, last in intersection(ranges, (length_class,)):
            yield from _aligned(first, last)


def _aligned(first: int, last: int) -> Iterator[tuple[ByteRange, ...]]:
    """Split characters of equal length until the bytes after the first that differs run over all their 64 values."""
    num_bytes = len(chr(last).encode())
    for bits in range(6, 6 * num_bytes, 6):
        low = (1 << bits) - 1
        if first & ~low != last & ~low:
            cut = first | low if first & low else (last & ~low) - 1 if last & low != low else None
            if cut is not None:
                yield from _aligned(first, cut)
                yield from _aligned(cut + 1, last)
                return
    yield tuple(zip(chr(first).encode(), chr(last).encode(), strict=True))

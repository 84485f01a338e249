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
from functools import cache
from itertools import accumulate

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
    end = nfa.add_state()
    return Determiniser(nfa, nfa.build(node, end), end).run()


class NFA:
    """Edges over byte ranges, and silent edges. It is built from the end of a text to its beginning."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[ByteRange, int]]] = []
        self.silent: list[list[int]] = []
        self._parts = 0

    def add_state(self, *silent: int) -> int:
        """A new state, with silent edges to these."""
        self._spend(1 + len(silent))
        self.edges.append([])
        self.silent.append(list(silent))
        return len(self.edges) - 1

    def _spend(self, parts: int) -> None:
        self._parts += parts
        if self._parts > MAX_PARTS:
            raise TooLargeError(f"it needs over {MAX_PARTS:,} states and edges")

    def build(self, node: Node, after: int) -> int:
        """The state from which all of the node's texts lead to `after`, and nothing else does."""
        self._spend(1)  # an empty part, repeated, adds no state but takes time
        match node:
            case Chars(ranges):
                return self._build_characters(ranges, after)
            case Seq(parts):
                for part in reversed(parts):
                    after = self.build(part, after)
                return after
            case Alt(options):
                return self.add_state(*(self.build(option, after) for option in options))
            case Selection(items, separator):
                return self._build_selection(items, separator, after)
        return self._build_repeat(node, after)

    def _build_characters(self, ranges: Ranges, after: int) -> int:
        """Ways over the UTF-8 of each character; those that end alike share the states of their ends."""
        start = self.add_state()
        shared: dict[tuple[ByteRange, ...], int] = {(): after}
        for path in utf8_paths(ranges):
            self._spend(len(path))
            for length in range(1, len(path)):
                rest = path[-length:]
                if rest not in shared:
                    shared[rest] = self.add_state()
                    self.edges[shared[rest]].append((rest[0], shared[rest[1:]]))
            self.edges[start].append((path[0], shared[path[1:]]))
        return start

    def _build_repeat(self, node: Repeat, after: int) -> int:
        """A chain of items, the last first; if there is no upper bound that one is also followed by itself."""
        following = self.add_state(after)
        last = max(node.low, 1) if node.high is None else node.high
        for number in range(last, 0, -1):
            item = self.build(node.item, following)
            if number == last and node.high is None:
                self.silent[following].append(self.build(node.separator, item))
            before = item if number == 1 else self.build(node.separator, item)
            following = self.add_state(before, after) if number > node.low else before
        return following

    def _build_selection(self, items: tuple[tuple[Node, bool], ...], separator: Node, after: int) -> int:
        """Two tracks past the items: while none was there yet, and after one, when a separator must come first."""
        none = some = after
        for item, required in reversed(items):
            first = self.build(item, some)
            next_one = self.build(separator, first)
            none = first if required else self.add_state(first, none)
            some = next_one if required else self.add_state(next_one, some)
        return none


class Determiniser:
    """Sets of NFA states as states of a deterministic automaton, found breadth first from the start."""

    def __init__(self, nfa: NFA, start: int, end: int) -> None:
        self._silent, self._start, self._end = nfa.silent, start, end
        self._class_of = byte_classes(byte for edges in nfa.edges for byte, _ in edges)
        self._moves = [
            [(range(self._class_of[low], self._class_of[high] + 1), target) for (low, high), target in edges]
            for edges in nfa.edges
        ]
        self._found: list[frozenset[int]] = [frozenset()]
        self._numbers: dict[frozenset[int], int] = {frozenset(): DEAD}
        self._number = cache(self._find)
        self._steps = 0

    def run(self) -> Automaton:
        self._number(frozenset([self._start]))
        table = [self._row(states) for states in self._found]  # more are found while it is walked
        accepting = [self._end in states for states in self._found]
        return Automaton(np.array(table, np.int32), np.array(self._class_of, np.uint8), np.array(accepting))

    def _row(self, states: frozenset[int]) -> list[int]:
        """Where each class of bytes leads from a set of states."""
        targets: list[set[int]] = [set() for _ in range(self._class_of[-1] + 1)]
        for state in states:
            for classes, target in self._moves[state]:
                self._spend(len(classes))
                for number in classes:
                    targets[number].add(target)
        return [self._number(frozenset(reached)) for reached in targets]

    def _find(self, reached: frozenset[int]) -> int:
        """The number of the state that holds all that is silently reached from these, new or known."""
        closed = self._close(reached)
        if closed not in self._numbers:
            if len(self._found) == MAX_STATES:
                raise TooLargeError(f"it needs over {MAX_STATES:,} states")
            self._numbers[closed] = len(self._found)
            self._found.append(closed)
        return self._numbers[closed]

    def _close(self, states: frozenset[int]) -> frozenset[int]:
        """All states reached over silent edges; of those kept that have other edges, and the two ends."""
        seen, todo = set(states), list(states)
        while todo:
            new = [target for target in self._silent[todo.pop()] if target not in seen]
            seen.update(new)
            todo += new
        self._spend(len(seen))
        return frozenset(state for state in seen if self._moves[state] or state in (self._start, self._end))

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise TooLargeError(f"it takes over {MAX_STEPS:,} steps to build")


def byte_classes(ranges: Iterable[ByteRange]) -> list[int]:
    """The class of each of the 256 bytes: those that every range holds or leaves out together are of one class.

    Classes are numbered as the bytes ascend, so a range of bytes is a range of classes.
    """
    begins = {edge for low, high in set(ranges) for edge in (low, high + 1)}
    return list(accumulate(byte > 0 and byte in begins for byte in range(256)))


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

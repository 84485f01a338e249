r"""A parser for regular expressions in the plain sense: those that a finite automaton can follow.

Supported, with the meaning they have in Python's `re` under `re.ASCII`:

* characters, `.` (all but a line feed), escaped punctuation, `\n \t \r \f \v`, `\xHH`, `\uHHHH`;
* `\d \w \s` and their opposites `\D \W \S`, ASCII only. With `search`, which is what JSON schemas mean, `\D \W \S` and
  `[^\d]` also leave out what is a digit, a letter or white space elsewhere in Unicode: readers of a schema differ there,
  and what is written must be valid to all;
* classes `[a-z_]`, `[^0-9]`;
* groups `( )` and `(?: )`, alternatives `|`;
* `* + ? {m} {m,} {m,n}`;
* `^` and `$` at the ends of the pattern or of an alternative outside all groups.

Everything else is refused by name: look-around, back references, word boundaries, named groups, flags, lazy and
possessive repeats, Unicode properties. They either leave the regular languages or mean something only to a search.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache

from minivllm.sample.grammar.syntax import EMPTY, UNICODE, Alt, Chars, Node, Ranges, Repeat, Seq, complement

SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
REPEATS = re.compile(r"([*+?])|\{([0-9]{1,6})(?:(,)([0-9]{0,6}))?\}")
HEXADECIMAL = re.compile("x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
SETS: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}


@cache
def unicode_set(name: str) -> Ranges:
    r"""The characters that `re` takes \d, \w or \s for without `re.ASCII`."""
    runs = re.finditer(rf"\{name}+", "".join(map(chr, range(sys.maxunicode + 1))))
    return tuple((run.start(), run.end() - 1) for run in runs)


class PatternError(ValueError):
    """A pattern that can't be followed; the message names the construct and where it stands."""


def parse_regex(pattern: str, characters: Callable[[Ranges], Node] = Chars, *, search: bool = False) -> Node:
    """The tree of a pattern that matches whole texts, or with `search` texts in which it is found somewhere.

    `characters` makes the node for one character of a set: how characters are spelt is not the pattern's business.
    Raises `PatternError` for what is not supported.
    """
    return _Parser(pattern, characters, search).parse()


class _Parser:
    """Recursive descent: alternatives of sequences of repeated atoms."""

    def __init__(self, pattern: str, characters: Callable[[Ranges], Node], search: bool) -> None:
        self._pattern, self._characters, self._search = pattern, characters, search
        self._at = 0
        self._negated = False  # within a class that begins with ^

    def parse(self) -> Node:
        tree = self._alternatives(self._whole)
        if self._at < len(self._pattern):
            raise self._refuse("')' without '('" if self._peek() == ")" else "'$' before the end")
        return tree

    def _alternatives(self, option: Callable[[], Node]) -> Node:
        options = [option()]
        while self._take("|"):
            options.append(option())
        return Alt(tuple(options))

    def _whole(self) -> Node:
        """An alternative outside all groups: here anchors have a meaning."""
        anything = Repeat(self._characters(UNICODE), 0, None) if self._search else EMPTY
        before = EMPTY if self._take("^") else anything
        body = self._sequence()
        return Seq((before, body, EMPTY if self._take("$") else anything))

    def _sequence(self) -> Node:
        parts = []
        while self._at < len(self._pattern) and self._peek() not in "|)$":
            parts.append(self._repeated())
        return Seq(tuple(parts))

    def _repeated(self) -> Node:
        item = self._atom()
        match = REPEATS.match(self._pattern, self._at)
        if match is None:
            return item
        self._at = match.end()
        if self._peek() in {*SIGNS, "{"}:
            raise self._refuse("a repeat of a repeat, lazy or possessive,")
        if match[1]:
            return Repeat(item, *SIGNS[match[1]])
        low = int(match[2])
        high = int(match[4]) if match[4] else None if match[3] else low
        if high is not None and high < low:
            raise self._refuse(f"{match[0]}, which ends before it begins,")
        return Repeat(item, low, high)

    def _atom(self) -> Node:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._characters(self._class())
        if character == ".":
            return self._characters(complement([(10, 10)]))
        if character == "\\":
            return self._characters(self._escape())
        if character in "*+?{^$":
            self._at -= 1
            raise self._refuse("an anchor here" if character in "^$" else f"{character!r} that repeats nothing")
        return self._characters(_only(character))

    def _group(self) -> Node:
        if not self._take("?:") and self._peek() == "?":
            raise self._refuse("a group that begins with (? (look-around, name, flag)")
        tree = self._alternatives(self._sequence)
        if not self._take(")"):
            raise self._refuse("an anchor within a group" if self._peek() == "$" else "'(' without ')'")
        return tree

    def _class(self) -> Ranges:
        """What stands between brackets; the first one is taken already."""
        negated = self._negated = self._take("^")
        if self._peek() == "]":
            raise self._refuse("an empty class")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            first = self._member()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                first = self._span(first, self._member())
            ranges += first
        self._negated = False
        outside = complement(ranges)
        return outside if negated else complement(outside)

    def _member(self) -> Ranges:
        character = self._next()
        return self._escape() if character == "\\" else _only(character)

    def _span(self, first: Ranges, last: Ranges) -> Ranges:
        low, high = first[0][0], last[-1][1]
        if not (first == ((low, low),) and last == ((high, high),) and low <= high):
            raise self._refuse("a range in a class whose ends are no characters in ascending order")
        return ((low, high),)

    def _escape(self) -> Ranges:
        r"""What a backslash, which is taken already, makes of what follows."""
        if match := HEXADECIMAL.match(self._pattern, self._at):
            self._at = match.end()
            return _only(chr(int(match[1] or match[2], 16)))
        character = self._next()
        if character.lower() in SETS:
            return self._set(character.lower(), character.isupper())
        if character.isalnum() and character not in CONTROLS:
            raise self._refuse(f"\\{character}")
        return _only(CONTROLS.get(character, character))

    def _set(self, name: str, opposite: bool) -> Ranges:
        """With `search`, the opposite of a set leaves out what any reader of the pattern may take to be in the set."""
        ranges = unicode_set(name) if self._search and opposite != self._negated else SETS[name]
        return complement(ranges) if opposite else ranges

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        if self._at == len(self._pattern):
            raise self._refuse("a pattern that breaks off")
        self._at += 1
        return self._pattern[self._at - 1]

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _refuse(self, what: str) -> PatternError:
        return PatternError(f"{what} is not supported (position {self._at})")


def _only(character: str) -> Ranges:
    return ((ord(character), ord(character)),)

"""How JSON is written: the trees of strings, numbers, lists and objects, and of any document up to a depth.

Between the tokens of JSON stands nothing, but for one space that may follow a comma or a colon: `json.dumps` writes so.
Numbers have 18 digits at most before the point and after it, and 2 in the exponent, so that no answer is a number that
never ends. Strings spell each character in one way: itself, or the short escape where it needs one. Control characters
without a short escape (`\\u0001`) are not written.
"""

from __future__ import annotations

import json

from minivllm.sample.grammar.regex import parse_regex
from minivllm.sample.grammar.syntax import UNICODE, Alt, Chars, Node, Ranges, Repeat, Selection, concat, intersection

ANY_DEPTH = 4
MAX_DIGITS = 18
LARGEST = 10**MAX_DIGITS - 1

SHORT_ESCAPES = {ord(character): json.dumps(character)[2] for character in '"\\\b\f\n\r\t'}
UNESCAPED: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))


SPACE = Repeat(concat(" "), 0, 1)
COMMA = concat(",", SPACE)
COLON = concat(":", SPACE)


def string_characters(ranges: Ranges) -> Node:
    """One character of a set, as it is spelt within a JSON string."""
    escapes = (ord(letter) for code, letter in SHORT_ESCAPES.items() if intersection(ranges, ((code, code),)))
    escaped = tuple((letter, letter) for letter in sorted(escapes))
    return Alt((Chars(intersection(ranges, UNESCAPED)), concat("\\", Chars(escaped))))


def string(low: int = 0, high: int | None = None) -> Node:
    """A string of `low` to `high` characters."""
    return concat('"', Repeat(string_characters(UNICODE), low, high), '"')


def array(item: Node, low: int = 0, high: int | None = None) -> Node:
    """A list of `low` to `high` items."""
    return concat("[", Repeat(item, low, high, COMMA), "]")


def mapping(value: Node) -> Node:
    """An object with any keys, whose values all have this form."""
    return concat("{", Repeat(concat(string(), COLON, value), 0, None, COMMA), "}")


def struct(fields: list[tuple[str, Node, bool]]) -> Node:
    """An object with these fields (name, value, whether it must be there), in this order."""
    items = tuple((concat(constant(name), COLON, value), required) for name, value, required in fields)
    return concat("{", Selection(items, COMMA), "}")


def integer(low: int, high: int) -> Node:
    """A whole number from `low` to `high`, both of 18 digits at most."""
    options = [f"-{_natural(max(1, -high), -low)}"] if low < 0 else []
    if high >= 0:
        options.append(_natural(max(0, low), high))
    return parse_regex("|".join(options))


def _natural(low: int, high: int) -> str:
    """A pattern for `low` to `high`, neither negative, split by their number of digits."""
    lengths = range(len(str(low)), len(str(high)) + 1)
    spans = [(max(low, 10 ** (n - 1)) if n > 1 else low, min(high, 10**n - 1)) for n in lengths]
    return f"({'|'.join(_same_length(str(first), str(last)) for first, last in spans)})"


def _same_length(low: str, high: str) -> str:
    """A pattern for the digits from `low` to `high`: those that begin as `low` does, as `high` does, and all between."""
    rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    options = [low[0] + _same_length(low[1:], "9" * rest), high[0] + _same_length("0" * rest, high[1:])]
    if int(high[0]) - int(low[0]) > 1:
        options.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    return f"({'|'.join(options)})"


NUMBER = parse_regex(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?")
BOOLEAN = parse_regex("true|false")
NULL = concat("null")


def constant(value: object) -> Node:
    """Exactly this value, as `json.dumps` writes it."""
    return concat(json.dumps(value, ensure_ascii=False))


def any_value(depth: int = ANY_DEPTH) -> Node:
    """Any value whose lists and objects are nested at most `depth` deep.

    An automaton must remember which brackets are open, so its states double with each level.
    """
    options = [string(), NUMBER, BOOLEAN, NULL]
    if depth:
        inner = any_value(depth - 1)
        options += [array(inner), mapping(inner)]
    return Alt(tuple(options))

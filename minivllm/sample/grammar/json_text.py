"""How JSON is written: the trees of strings, numbers, lists and objects, and of any document up to a depth.

Between the tokens of JSON stands nothing, but for one space that may follow a comma or a colon: `json.dumps` writes so.
Numbers have 18 digits at most before the point and after it, and 2 in the exponent, so that no answer is a number that
never ends. Strings spell each character in one way: itself, or the short escape where it needs one. Control characters
without a short escape (`\\u0001`) are not written.
"""

from __future__ import annotations

import json

from minivllm.sample.grammar.syntax import (
    UNICODE,
    Alt,
    Chars,
    Node,
    Ranges,
    Repeat,
    Selection,
    complement,
    intersection,
    literal,
    optional,
    sequence,
)

ANY_DEPTH = 4
MAX_DIGITS = 18
LARGEST = 10**MAX_DIGITS - 1

SHORT_ESCAPES = {ord(character): json.dumps(character)[2] for character in '"\\\b\f\n\r\t'}
UNESCAPED = complement([(0, 0x1F), *((code, code) for code in SHORT_ESCAPES)])

SPACE = optional(literal(" "))
COMMA = sequence(",", SPACE)
COLON = sequence(":", SPACE)
DIGIT = Chars(((48, 57),))


def string_characters(ranges: Ranges) -> Node:
    """One character of a set, as it is spelt within a JSON string."""
    escapes = (ord(letter) for code, letter in SHORT_ESCAPES.items() if intersection(ranges, ((code, code),)))
    escaped = tuple((letter, letter) for letter in sorted(escapes))
    return Alt((Chars(intersection(ranges, UNESCAPED)), sequence("\\", Chars(escaped))))


def string(low: int = 0, high: int | None = None) -> Node:
    """A string of `low` to `high` characters."""
    return sequence('"', Repeat(string_characters(UNICODE), low, high), '"')


def array(item: Node, low: int = 0, high: int | None = None) -> Node:
    """A list of `low` to `high` items."""
    return sequence("[", Repeat(item, low, high, COMMA), "]")


def mapping(value: Node) -> Node:
    """An object with any keys, whose values all have this form."""
    return sequence("{", Repeat(sequence(string(), COLON, value), 0, None, COMMA), "}")


def struct(fields: list[tuple[str, Node, bool]]) -> Node:
    """An object with these fields (name, value, whether it must be there), in this order."""
    items = tuple((sequence(constant(name), COLON, value), required) for name, value, required in fields)
    return sequence("{", Selection(items, COMMA), "}")


def integer(low: int, high: int) -> Node:
    """A whole number from `low` to `high`, both of 18 digits at most."""
    options: list[Node] = []
    if low < 0:
        options.append(sequence("-", _natural(max(1, -high), -low)))
    if high >= 0:
        options.append(_natural(max(0, low), high))
    return Alt(tuple(options))


def _natural(low: int, high: int) -> Node:
    """`low` to `high`, neither negative, split by their number of digits; nothing if `low` is larger."""
    lengths = range(len(str(low)), len(str(high)) + 1)
    spans = [(max(low, 10 ** (n - 1) if n > 1 else 0), min(high, 10**n - 1)) for n in lengths]
    return Alt(tuple(_same_length(str(first), str(last)) for first, last in spans if first <= last))


def _same_length(low: str, high: str) -> Node:
    """The digits from `low` to `high`: those that begin as `low` does, as `high` does, and all between."""
    if low == "0" * len(low) and high == "9" * len(high):
        return Repeat(DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return sequence(low[0], _same_length(low[1:], high[1:]))
    rest = len(low) - 1
    options = [
        sequence(low[0], _same_length(low[1:], "9" * rest)),
        sequence(high[0], _same_length("0" * rest, high[1:])),
    ]
    if ord(high[0]) - ord(low[0]) > 1:
        between = Chars(((ord(low[0]) + 1, ord(high[0]) - 1),))
        options.append(sequence(between, Repeat(DIGIT, rest, rest)))
    return Alt(tuple(options))


def number() -> Node:
    """Any number that fits the bounds on digits."""
    whole = sequence(
        optional(literal("-")), Alt((literal("0"), sequence(Chars(((49, 57),)), Repeat(DIGIT, 0, MAX_DIGITS - 1))))
    )
    fraction = sequence(".", Repeat(DIGIT, 1, MAX_DIGITS))
    exponent = sequence(Chars(((69, 69), (101, 101))), optional(Chars(((43, 43), (45, 45)))), Repeat(DIGIT, 1, 2))
    return sequence(whole, optional(fraction), optional(exponent))


def constant(value: object) -> Node:
    """Exactly this value, as `json.dumps` writes it."""
    return literal(json.dumps(value, ensure_ascii=False))


BOOLEAN = Alt((literal("true"), literal("false")))
NULL = literal("null")


def any_value(depth: int = ANY_DEPTH) -> Node:
    """Any value whose lists and objects are nested at most `depth` deep.

    An automaton must remember which brackets are open, so its states double with each level.
    """
    options = [string(), number(), BOOLEAN, NULL]
    if depth:
        inner = any_value(depth - 1)
        options += [array(inner), mapping(inner)]
    return Alt(tuple(options))

"""Numbers with units: read from what somebody typed, and compared with what a formula says."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType

from minivllm.calc import hw, memory, models, roofline
from minivllm.course.manifest import CourseError

_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
_BYTES = {f"{prefix}b": ("bytes", factor) for prefix, factor in _PREFIXES.items()}
_RATES = {f"{unit}/s": ("bytes/s", factor) for unit, (_, factor) in _BYTES.items()}
_TIMES = {
    ("s", "sec", "second", "seconds"): 1.0,
    ("ms", "millisecond", "milliseconds"): 1e-3,
    ("us", "µs", "μs", "microsecond", "microseconds"): 1e-6,
    ("ns",): 1e-9,
    ("h", "hour", "hours"): 3600.0,
}
_COUNTS = (
    "token", "block", "slot", "sequence", "request", "step", "page", "process",
    "gpu", "character", "matrix", "item",
)  # fmt: skip
_PLURALS = {"matrix": "matrices", "process": "processes"}
_SPELLED = {"seq": "sequence", "seqs": "sequence", "char": "character", "chars": "character"}

UNITS: dict[str, tuple[str, float]] = {
    "": ("", 1.0),
    "%": ("", 0.01),
    "percent": ("", 0.01),
    "x": ("", 1.0),
    "\N{MULTIPLICATION SIGN}": ("", 1.0),
    "times": ("", 1.0),
    "bytes": ("bytes", 1.0),
    "byte": ("bytes", 1.0),
    "bit": ("bit", 1.0),
    "bits": ("bit", 1.0),
    "flop/b": ("flop/b", 1.0),
    "b/token": ("bytes/token", 1.0),
    "kib/token": ("bytes/token", 2.0**10),
    **_BYTES,
    **_RATES,
    **{name: ("s", seconds) for names, seconds in _TIMES.items() for name in names},
    **{name: ("tok/s", 1.0) for name in ("tok/s", "token/s", "tokens/s", "t/s", "tps")},
    **{name: (count, 1.0) for count in _COUNTS for name in (count, _PLURALS.get(count, count + "s"))},
    **{short: (count, 1.0) for short, count in _SPELLED.items()},
}
"""Unit in lower case -> (what it measures, how many base units it is)."""

_SPOKEN_RATE = re.compile(r"\b(?:tok|tokens?)\s+(?:per|a|each|every)\s+second\b", re.I)
_NUMBER = re.compile(
    r"(?<![\w.])(?P<number>\d{1,3}(?:[,_]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<exponent>e[+-]?\d+)?"
    r"(?P<thousand>k\b)?[ -]?(?P<unit>%|\u00d7|[A-Za-zµμ]+(?:/[A-Za-z]+)?)?",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number in base units (bytes, seconds, tokens, ...). `measure` is "" for plain numbers and ratios."""

    value: float
    measure: str
    text: str
    plain: float
    """The number as it was written, before its unit."""


def read_quantities(text: str) -> Iterator[Quantity]:
    """The numbers in a text, each with the unit behind it if there is a known one.

    "12.2 GiB", "6,249 blocks", "34k tok/s", "16-token", "98 %", "1e3 ms" and "9 tokens per second" are understood.
    """
    for match in _NUMBER.finditer(_SPOKEN_RATE.sub("tok/s", text)):
        plain = float(match["number"].replace(",", "").replace("_", "") + (match["exponent"] or ""))
        plain *= 1e3 if match["thousand"] else 1
        unit = (match["unit"] or "").lower()
        measure, factor = UNITS.get(unit, ("", 1.0))
        yield Quantity(plain * factor, measure, match[0].strip(), plain)


def to_base(value: float, unit: str) -> tuple[float, str]:
    """A value in a unit -> (value in base units, what it measures); `CourseError` for a unit nobody knows."""
    if unit.lower() not in UNITS:
        raise CourseError(f"unit={unit!r}: unknown; add it to minivllm/course/quantities.py:UNITS")
    measure, factor = UNITS[unit.lower()]
    return value * factor, measure


class Verdict(StrEnum):
    """What an answer says about one expected number."""

    RIGHT = "right"
    NO_UNIT = "right, but say the unit"
    OTHER_UNIT = "right figure, wrong unit"
    MISSING = "missing or wrong"

    @property
    def counts(self) -> bool:
        """Whether the number is good enough to score."""
        return self in (Verdict.RIGHT, Verdict.NO_UNIT)


def judge(answer: str, expected: float, unit: str, tolerance: float) -> Verdict:
    """Look in an answer for a number: `expected` in `unit`, within a relative `tolerance`.

    The best that any number of the answer deserves: right with its unit (any unit of the same measure), right without
    one, or the right figure with a unit that makes it wrong (GB for GiB, ms for s). Else it is missing.
    """
    base, measure = to_base(expected, unit)
    found = set()
    for quantity in read_quantities(answer):
        same_figure = math.isclose(quantity.plain, expected, rel_tol=tolerance)
        if quantity.measure == measure and math.isclose(quantity.value, base, rel_tol=tolerance):
            found.add(Verdict.RIGHT)
        elif same_figure:
            found.add(
                Verdict.NO_UNIT if quantity.plain == quantity.value and not quantity.measure else Verdict.OTHER_UNIT
            )
    return min(found, key=list(Verdict).index, default=Verdict.MISSING)


_BUILTINS = {"round": round, "sum": sum, "min": min, "max": max, "len": len, "range": range}


def calculate(formula: str) -> float:
    """The value of a formula over `minivllm.calc` and `math`: "decode_tps(M4_MAX.bandwidth_bytes_per_s, 4.92e9)".

    Raises `CourseError` with the formula when a name is unknown or the result is not a finite number.
    """
    try:
        code = compile(ast.parse(formula.strip(), mode="eval"), "<formula>", "eval")
        value = float(eval(code, {"__builtins__": _BUILTINS, **_names()}))
    except Exception as error:
        raise CourseError(f"formula {formula!r}: {type(error).__name__}: {error}") from None
    if not math.isfinite(value):
        raise CourseError(f"formula {formula!r} gives {value}")
    return value


def _names() -> dict[str, object]:
    modules: tuple[ModuleType, ...] = (math, hw, models, roofline, memory)
    return {name: value for module in modules for name, value in vars(module).items() if not name.startswith("_")}

"""The question bank, `lessons/questions.toml`: what an interviewer asks, what a good answer holds, where it is taught.

One file feeds the interview, the heads of the chapters and the book's question index. `validate` holds it to the code:
every number is computed by its formula, every symbol resolves, every exercise exists.
"""

from __future__ import annotations

import importlib
import math
import re
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from minivllm.course.manifest import ROOT, CourseError
from minivllm.course.quantities import Verdict, calculate, judge, read_quantities, to_base

QUESTIONS = ROOT / "lessons" / "questions.toml"
ROW_ID = re.compile(r"[AB]\d{1,2}")


class QuestionError(CourseError):
    """The question bank is wrong."""

    def __init__(self, row: str, field: str, problem: str) -> None:
        super().__init__(f"lessons/questions.toml, {row}, {field}: {problem}")


@dataclass(frozen=True, slots=True)
class Chapter:
    """A chapter of the book. `part` is the key that `interview --part` takes."""

    number: int
    part: str
    title: str

    @property
    def source(self) -> Path | None:
        """The chapter's text, or None while it isn't written."""
        return next(iter(sorted((ROOT / "lessons" / "src").glob(f"{self.number:02d}_*.md"))), None)


@dataclass(frozen=True, slots=True)
class Number:
    """A number a good answer holds: `quoted` is how the model answer prints it, `formula` where it comes from.

    `unit` is what the formula's result is in, `tolerance` relative. `calculate` and `UNITS` say what is understood.
    """

    ask: str
    formula: str
    quoted: str
    unit: str = ""
    tolerance: float = 0.05

    @property
    def value(self) -> float:
        """In `unit`."""
        return calculate(self.formula)

    def judge(self, answer: str) -> Verdict:
        """What an answer says about this number."""
        return judge(answer, self.value, self.unit, self.tolerance)


@dataclass(frozen=True, slots=True)
class Wrong:
    """A common wrong answer, and what is wrong with it."""

    answer: str
    why: str


@dataclass(frozen=True, slots=True)
class FollowUp:
    """What the interviewer asks next, and what the answer of a senior engineer includes."""

    question: str
    senior: str


@dataclass(frozen=True, slots=True)
class Question:
    """One row: the question, a 90-second answer, how to score one's own, and where it is taught.

    `correction` says where the usual short answer is wrong or dated. `symbols` (`module:qualname`) are the engine's own
    code for it; `exercises` the ids in `exercises/manifest.toml`.
    """

    id: str
    chapter: int
    title: str
    question: str
    answer: str
    rubric: tuple[str, ...]
    numbers: tuple[Number, ...] = ()
    wrong: tuple[Wrong, ...] = ()
    followups: tuple[FollowUp, ...] = ()
    correction: str = ""
    exercises: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()

    @property
    def words(self) -> int:
        return len(self.answer.split())


@dataclass(frozen=True, slots=True)
class Bank:
    """All chapters and questions, in reading order."""

    chapters: tuple[Chapter, ...]
    questions: tuple[Question, ...]

    def chapter(self, number: int) -> Chapter:
        """The chapter of that number; `CourseError` if there is none."""
        return _find(self.chapters, "number", number, "chapter")

    def question(self, id: str) -> Question:
        """The question of that row; `CourseError` with the rows there are if there is none."""
        return _find(self.questions, "id", id.upper(), "row")

    def of_chapter(self, number: int) -> list[Question]:
        """The questions that a chapter teaches."""
        return [question for question in self.questions if question.chapter == number]

    def of_part(self, part: str) -> list[Question]:
        """The questions of a part of the book; `CourseError` with the parts there are if there is none."""
        parts = list(dict.fromkeys(chapter.part for chapter in self.chapters))
        if part not in parts:
            raise CourseError(f"part={part!r}: must be one of {', '.join(parts)}")
        return [q for q in self.questions if self.chapter(q.chapter).part == part]


Item = TypeVar("Item")


def _find(items: tuple[Item, ...], field: str, value: object, what: str) -> Item:
    for item in items:
        if getattr(item, field) == value:
            return item
    known = ", ".join(str(getattr(item, field)) for item in items)
    raise CourseError(f"{what}={value!r}: there is none; there are {known}")


# reading


def load_bank(path: Path = QUESTIONS) -> Bank:
    """Read the bank; `QuestionError` naming row and field if a field is missing, unknown or of the wrong type."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CourseError(f"{path}: {error}") from None
    chapters = [_build(Chapter, entry, f"chapter {entry.get('number')}") for entry in data.get("chapter", [])]
    questions = [_question(entry) for entry in data.get("row", [])]
    for row in questions:
        if row.chapter not in {chapter.number for chapter in chapters}:
            raise QuestionError(row.id, "chapter", f"{row.chapter} is not in the list of chapters")
    _unique([row.id for row in questions])
    return Bank(tuple(chapters), tuple(sorted(questions, key=lambda row: row.chapter)))


def _question(entry: dict[str, Any]) -> Question:
    row = str(entry.get("id", "a row without id"))
    nested = {"numbers": ("number", Number), "wrong": ("wrong", Wrong), "followups": ("followup", FollowUp)}
    read = dict(entry)
    for field, (key, kind) in nested.items():
        read[field] = [_build(kind, item, f"{row}, {key} {i + 1}") for i, item in enumerate(read.pop(key, []))]
    return _build(Question, read, row)


def _build(kind: type[Item], entry: dict[str, Any], where: str) -> Item:
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in entry:
        if name not in known:
            raise QuestionError(where, name, f"is no field; there are {', '.join(known)}")
    for name, field in known.items():
        if field.default is MISSING and name not in entry:
            raise QuestionError(where, name, "is missing")
    return kind(**{name: _value(entry[name], str(known[name].type), where, name) for name in entry})


def _value(value: Any, annotation: str, where: str, name: str) -> Any:
    if annotation.startswith("tuple"):
        if not isinstance(value, list):
            raise QuestionError(where, name, "must be a list")
        return tuple(_text(item) if isinstance(item, str) else item for item in value)
    allowed = {"str": (str,), "int": (int,), "float": (float, int)}[annotation]
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise QuestionError(where, name, f"must be of type {annotation}")
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    """Lines of a paragraph joined, paragraphs kept apart by an empty line."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _unique(ids: list[str]) -> None:
    for row in ids:
        if ids.count(row) > 1:
            raise QuestionError(row, "id", "occurs twice")


# checking against the code


def validate(question: Question, exercises: set[str]) -> None:
    """Raise `QuestionError` unless everything a question claims holds: its numbers, symbols and exercises."""
    if not ROW_ID.fullmatch(question.id):
        raise QuestionError(question.id, "id", "must be like A22 or B1")
    if not 100 <= question.words <= 300:
        raise QuestionError(question.id, "answer", f"has {question.words} words; 90 seconds hold 100 to 300")
    for field, least in (("rubric", 3), ("wrong", 2), ("followups", 3)):
        if len(getattr(question, field)) < least:
            raise QuestionError(question.id, field, f"needs at least {least}")
    for number in question.numbers:
        _check_number(question, number)
    for symbol in question.symbols:
        resolve(symbol, question.id)
    for exercise in question.exercises:
        if exercise not in exercises:
            raise QuestionError(question.id, "exercises", f"{exercise} is not in exercises/manifest.toml")


def _check_number(question: Question, number: Number) -> None:
    where = f"{question.id}, number {number.ask!r}"
    to_base(1, number.unit)
    if number.quoted not in question.answer:
        raise QuestionError(where, "quoted", f"{number.quoted!r} is not in the answer")
    printed = next(iter(read_quantities(number.quoted)), None)
    if printed is None or not _rounds_to(number.value, printed.plain, number.quoted):
        raise QuestionError(where, "quoted", f"{number.quoted!r} but the formula gives {number.value:.6g}")
    if number.judge(question.answer) is not Verdict.RIGHT:
        raise QuestionError(where, "unit", f"the answer itself does not give {number.quoted} in {number.unit!r}")


def _rounds_to(value: float, printed: float, text: str) -> bool:
    """Whether `text` prints `value`: to its last decimal, or within 1.5 % where it is rounded further ("34,000")."""
    decimals = re.search(r"\.(\d+)", text)
    half_digit = 0.5 * 10.0 ** -(len(decimals[1]) if decimals else 0)
    return math.isclose(printed, value, abs_tol=half_digit, rel_tol=0.015)


def resolve(symbol: str, row: str = "") -> object:
    """The object that `module:qualname` names; `QuestionError` if there is none."""
    module, _, qualname = symbol.partition(":")
    try:
        found: object = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise QuestionError(row, "symbols", f"{symbol} does not resolve: {error}") from None
    return found

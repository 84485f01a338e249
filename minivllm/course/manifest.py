"""The list of exercises, `exercises/manifest.toml`, read into types; every error names exercise, field and fix."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from minivllm.config import MinivllmError

ROOT = Path(__file__).parents[2]
"""The folder that holds `minivllm/`, `exercises/`, `solutions/` and `tests/`."""

ID = re.compile(r"[a-z]+-\d\d")


class CourseError(MinivllmError):
    """Something about an exercise is wrong; the message says what to do."""


class ManifestError(CourseError):
    """The manifest is wrong."""

    def __init__(self, exercise: str, field: str, problem: str) -> None:
        super().__init__(f"exercises/manifest.toml, {exercise}, {field}: {problem}")


@dataclass(frozen=True, slots=True)
class Hole:
    """A function, method or class of the engine that a student writes: `module:qualname`."""

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def path(self) -> str:
        """The module's file, below the root."""
        return self.module.replace(".", "/") + ".py"

    @classmethod
    def parse(cls, text: str) -> Hole:
        """Read `module:qualname`; `ValueError` if it has no colon."""
        module, colon, qualname = text.partition(":")
        if not (module and colon and qualname):
            raise ValueError(f"{text!r} is not of the form 'package.module:Class.method'")
        return cls(module, qualname)


@dataclass(frozen=True, slots=True)
class Part:
    """One named behaviour, worth `points` when all its tests pass. The name completes "it must be that ..."."""

    name: str
    points: int


@dataclass(frozen=True, slots=True)
class Exercise:
    """One exercise. Limits are those of the process it is graded in: `seconds` in all and `part_seconds` a test,
    `memory_gib` of address space, `processes` beside its own."""

    id: str
    name: str
    title: str
    chapter: int
    row: str
    holes: tuple[Hole, ...]
    minutes: int
    difficulty: int
    parts: tuple[Part, ...]
    hints: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    seconds: float = 90.0
    part_seconds: float = 10.0
    memory_gib: float = 4.0
    processes: int = 32

    @property
    def slug(self) -> str:
        """The id as it appears in file and test names: `kv_03`."""
        return self.id.replace("-", "_")

    @property
    def file_name(self) -> str:
        return f"{self.slug}_{self.name}.py"

    @property
    def points(self) -> int:
        return sum(part.points for part in self.parts)

    @property
    def test_file(self) -> str:
        """The grader, below the root."""
        return f"tests/exercises/test_{self.slug}.py"


def load_manifest(root: Path = ROOT) -> dict[str, Exercise]:
    """All exercises by id, in the order of the file. Raises `ManifestError`."""
    path = root / "exercises" / "manifest.toml"
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise CourseError(f"{path} is missing: run from a clone of the course") from None
    except tomllib.TOMLDecodeError as error:
        raise ManifestError("whole file", "syntax", str(error)) from None
    exercises: dict[str, Exercise] = {}
    for number, row in enumerate(data.get("exercise", []), 1):
        exercise = _exercise(row, str(row.get("id", f"exercise number {number}")))
        if exercise.id in exercises:
            raise ManifestError(exercise.id, "id", "is used twice; give each exercise its own")
        for need in exercise.needs:
            if need not in exercises:
                raise ManifestError(exercise.id, "needs", f"{need!r} is not an earlier exercise")
        exercises[exercise.id] = exercise
    return exercises


def find_exercise(exercises: dict[str, Exercise], id: str) -> Exercise:
    """The exercise of that id (`kv-03`, also `kv_03`); `CourseError` lists the ids there are."""
    if (exercise := exercises.get(id.replace("_", "-"))) is None:
        raise CourseError(f"there is no exercise {id!r}; there are: {', '.join(exercises)}")
    return exercise


def _exercise(row: dict[str, Any], name: str) -> Exercise:
    row = {("parts" if key == "part" else key): value for key, value in row.items()}
    known = {field.name: field for field in fields(Exercise)}
    for key in row:
        if key not in known:
            raise ManifestError(name, key, f"is not a field; fields are {', '.join(known)}")
    for key, field in known.items():
        if key not in row and field.default is MISSING:
            raise ManifestError(name, "part" if key == "parts" else key, "is missing; every exercise needs it")
    values = {key: _value(name, key, str(known[key].type), value) for key, value in row.items()}
    exercise = Exercise(**values)
    _check(exercise)
    return exercise


def _value(name: str, key: str, kind: str, value: Any) -> Any:
    """One field, checked against its annotation."""
    if key == "parts":
        return tuple(_part(name, part) for part in value)
    if kind.startswith("tuple"):
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ManifestError(name, key, f"must be a list of strings, not {value!r}")
        return tuple(_hole(name, v) for v in value) if key == "holes" else tuple(value)
    wanted: tuple[type, ...] = {"str": (str,), "int": (int,), "float": (int, float)}[kind]
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ManifestError(name, key, f"must be of type {kind}, not {value!r}")
    return value


def _hole(name: str, text: str) -> Hole:
    try:
        return Hole.parse(text)
    except ValueError as error:
        raise ManifestError(name, "holes", str(error)) from None


def _part(name: str, row: Any) -> Part:
    if not isinstance(row, dict) or set(row) != {"name", "points"}:
        raise ManifestError(name, "part", f"needs exactly name and points, not {row!r}")
    if not isinstance(row["points"], int) or row["points"] < 1:
        raise ManifestError(
            name, f"part {row['name']!r}", f"points must be a whole number above 0, not {row['points']!r}"
        )
    return Part(str(row["name"]), row["points"])


def _check(exercise: Exercise) -> None:
    if not ID.fullmatch(exercise.id):
        raise ManifestError(exercise.id, "id", "must be an area and two digits, as in kv-03")
    if not exercise.name.isidentifier():
        raise ManifestError(exercise.id, "name", f"{exercise.name!r} becomes part of a file name: letters, digits, _")
    if not exercise.holes:
        raise ManifestError(exercise.id, "holes", "is empty; name at least one function of the engine")
    if not exercise.parts:
        raise ManifestError(exercise.id, "part", "is missing; add [[exercise.part]] with name and points")
    if len({part.name for part in exercise.parts}) < len(exercise.parts):
        raise ManifestError(exercise.id, "part", "two parts have the same name")
    if not 1 <= exercise.difficulty <= 5:
        raise ManifestError(exercise.id, "difficulty", f"must be 1 to 5, not {exercise.difficulty}")

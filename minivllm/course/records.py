"""What grading says: a record of each test, put together to a result of each exercise. Plain data, no pytest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from minivllm.course.manifest import ROOT, CourseError, Exercise, Part


class Status(StrEnum):
    """What became of a part, the worst last: a part is as good as its worst test."""

    PASSED = "passed"
    NOT_STARTED = "not started"
    FAILED = "failed"
    SKIPPED = "skipped"
    TIMEOUT = "out of time"
    NOT_RUN = "not run"


class End(StrEnum):
    """How grading an exercise ended. Everything but `FINISHED` awards nothing."""

    FINISHED = "finished"
    MISSING = "no file"
    REFUSED = "refused"
    BROKEN = "can't be loaded"
    EXITED = "ended its process"
    OUT_OF_TIME = "out of time"
    OUT_OF_MEMORY = "out of memory"
    TOO_MANY_PROCESSES = "too many processes"
    TAMPERED = "changed the grader"


@dataclass(slots=True)
class PartRecord:
    """One test of a part. `why` is a sentence; `where` a place in the student's file."""

    exercise: str
    part: str
    test: str
    status: Status
    why: str = ""
    detail: str = ""
    counterexample: str = ""
    where: str = ""
    error: str = ""
    seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(
            {key: value[:4000] if isinstance(value, str) else value for key, value in asdict(self).items()}
        )

    @classmethod
    def from_json(cls, text: str) -> PartRecord:
        """Raises `ValueError`, `TypeError` or `KeyError` if it is none."""
        values = json.loads(text)
        return cls(**values | {"status": Status(values["status"])})


@dataclass(slots=True)
class PartResult:
    """A part with its tests' records."""

    part: Part
    records: list[PartRecord]

    @property
    def worst(self) -> PartRecord:
        """The record that decides: of the worst status, the first."""
        order = list(Status)
        return max(self.records, key=lambda record: order.index(record.status))

    @property
    def status(self) -> Status:
        return self.worst.status if self.records else Status.NOT_RUN


@dataclass(slots=True)
class Result:
    """One exercise, graded. `reason` explains an `end` other than finished; `flags` are for a human to look at."""

    exercise: Exercise
    impl: str
    parts: list[PartResult]
    end: End
    reason: str = ""
    flags: list[str] = field(default_factory=list)
    output: str = ""
    seconds: float = 0.0

    @classmethod
    def assemble(
        cls, exercise: Exercise, impl: str, records: Iterable[PartRecord], end: End, reason: str = ""
    ) -> Result:
        """Sort test records into parts. Only the first record of a test counts."""
        first: dict[tuple[str, str], PartRecord] = {}
        for record in records:
            first.setdefault((record.part, record.test), record)
        parts = [PartResult(part, [r for r in first.values() if r.part == part.name]) for part in exercise.parts]
        return cls(exercise, impl, parts, end, reason)

    def earned(self, part: PartResult) -> int:
        """Points of a part: all or none."""
        return part.part.points if self.end is End.FINISHED and part.status is Status.PASSED else 0

    @property
    def points(self) -> int:
        return sum(self.earned(part) for part in self.parts)

    @property
    def full(self) -> bool:
        return self.points == self.exercise.points

    @property
    def untouched(self) -> bool:
        """Whether nothing was written yet: not one test gets past a stub."""
        return self.end is End.FINISHED and all(
            r.status is Status.NOT_STARTED for part in self.parts for r in part.records
        )


def answer_path(exercise: Exercise, impl: str, root: Path = ROOT) -> Path:
    """The file that answers an exercise, for `exercises`, `solutions`, a folder or a file."""
    folder = root / impl if impl in ("exercises", "solutions") else Path(impl).resolve()
    if not folder.is_dir():
        if not folder.exists():
            raise CourseError(f"--impl {impl}: is not engine, exercises, solutions, nor a file or folder")
        return folder
    for path in (folder / exercise.file_name, folder / "exercises" / exercise.file_name):
        if path.exists():
            return path
    kept = (root / "exercises" / "stubs").exists()
    advice = "; exercises/stubs has the stub" if kept else "; python -m minivllm.course.cut writes the stub"
    raise CourseError(f"{folder.name} has no {exercise.file_name}" + advice * (folder == root / "exercises"))

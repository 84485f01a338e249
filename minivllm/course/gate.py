"""Prove that the graders grade: `python -m minivllm.course.gate [ID ...] [--markdown]`.

For each exercise: the engine and the solution pass every part; the stub fails every part with its own
NotImplementedError; every mutant (a wrong answer of `tests/exercises/mutants/`) fails some part and every part fails some
mutant; answers that are right but different (`tests/exercises/right_but_different/`) get full marks; nothing is skipped;
every hole has a docstring. A verdict is kept in `.cache/` for as long as the files that it came from stay the same.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minivllm.course import cut
from minivllm.course.grading import Graded, Task, grade
from minivllm.course.manifest import ROOT, CourseError, Exercise, find_exercise, load_manifest
from minivllm.course.records import End, Status

REQUIRED_REWRITES = 2
"""Of each exercise there must be this many right but different answers."""

NOT_A_WRONG_ANSWER = frozenset({"NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError"})
"""Errors by which a mutant fails because it is badly written, not because a grader saw through it."""


@dataclass(slots=True)
class Verdict:
    """How one answer did: statuses by part (missing: no test ran), error types, how it ended."""

    end: str
    reason: str
    statuses: dict[str, str]
    whys: dict[str, str]
    errors: list[str]
    seconds: float

    @classmethod
    def of(cls, graded: Graded) -> Verdict:
        parts = [part for part in graded.result.parts if part.records]
        return cls(
            end=graded.result.end,
            reason=graded.result.reason,
            statuses={part.part.name: part.status for part in parts},
            whys={part.part.name: part.worst.why for part in parts},
            errors=sorted({record.error for part in parts for record in part.records if record.error}),
            seconds=round(graded.result.seconds, 2),
        )

    def failed(self, exercise: Exercise) -> list[str]:
        """Parts that earned nothing."""
        if self.end != End.FINISHED:
            return [part.name for part in exercise.parts]
        return [part.name for part in exercise.parts if self.statuses.get(part.name) != Status.PASSED]


@dataclass(slots=True)
class Report:
    """What the gate found out about one exercise."""

    exercise: Exercise
    kills: dict[str, list[str]] = field(default_factory=dict)
    sentences: dict[str, str] = field(default_factory=dict)
    rewrites: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Case:
    """One answer to judge, and what must come out."""

    exercise: Exercise
    kind: str
    task: Task

    @property
    def name(self) -> str:
        return Path(self.task.impl).stem


# cases


def cases(exercise: Exercise, stubs: Path, root: Path) -> list[Case]:
    """All answers to judge. The stub is cut anew: the one in `exercises/` may be somebody's work."""
    stub = stubs / exercise.file_name
    stub.write_text(cut.cut(exercise, root)[0])
    found = [
        Case(exercise, "engine", Task(exercise, "engine", quick=True)),
        Case(exercise, "solution", Task(exercise, str(root / "solutions" / exercise.file_name), quick=True)),
        Case(exercise, "stub", Task(exercise, str(stub), quick=True)),
    ]
    for kind, folder in (("mutant", "mutants"), ("rewrite", "right_but_different")):
        for path in sorted((root / "tests" / "exercises" / folder / exercise.slug).glob("*.py")):
            found.append(Case(exercise, kind, Task(exercise, str(path), complete=kind == "rewrite", quick=True)))
    return found


def judge(cases: Sequence[Case], cache: Cache, root: Path) -> list[Verdict]:
    """A verdict for each case, from the cache where nothing has changed."""
    verdicts = [cache.get(case) for case in cases]
    open_cases = [i for i, verdict in enumerate(verdicts) if verdict is None]
    graded = grade([cases[i].task for i in open_cases], at_once=os.cpu_count() or 1, root=root)
    for i, one in zip(open_cases, graded, strict=True):
        verdicts[i] = Verdict.of(one)
        cache.put(cases[i], verdicts[i], one.files)
    return [verdict for verdict in verdicts if verdict is not None]


class Cache:
    """Verdicts by the content of everything that they depend on: answer, grader, manifest row, engine and course files."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root
        self._hashes: dict[str, str] = {}
        try:
            self._entries: dict[str, dict[str, object]] = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            self._entries = {}

    def get(self, case: Case) -> Verdict | None:
        """The verdict of a case whose files are all what they were."""
        entry = self._entries.get(self._key(case))
        if entry is None:
            return None
        files = entry["files"]
        assert isinstance(files, dict)
        if any(self._hash(name) != digest for name, digest in files.items()):
            return None
        return Verdict(**entry["verdict"])  # type: ignore[arg-type]

    def put(self, case: Case, verdict: Verdict | None, files: Iterable[str]) -> None:
        """Keep a verdict with the files that it came from. One without files (the process broke off) is not kept."""
        if verdict is not None and (used := set(files)):
            used |= {case.exercise.test_file, "pyproject.toml", "tests/conftest.py"}
            entry = {"files": {name: self._hash(name) for name in sorted(used)}, "verdict": _as_dict(verdict)}
            self._entries[self._key(case)] = entry

    def save(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self._entries, indent=1))

    def _key(self, case: Case) -> str:
        text = "" if case.kind == "engine" else Path(case.task.impl).read_text()
        return f"{case.kind} {case.name} " + hashlib.sha256(f"{case.exercise!r}{text}".encode()).hexdigest()[:24]

    def _hash(self, name: str) -> str:
        if name not in self._hashes:
            path = self.root / name
            self._hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:24] if path.exists() else ""
        return self._hashes[name]


def _as_dict(verdict: Verdict) -> dict[str, object]:
    return {name: getattr(verdict, name) for name in Verdict.__slots__}


# verdicts


def assess(exercise: Exercise, cases: Sequence[Case], verdicts: Sequence[Verdict], root: Path) -> Report:
    """Everything that is wrong with an exercise, and its kill table."""
    report = Report(exercise, problems=hole_problems(exercise, root))
    for case, verdict in zip(cases, verdicts, strict=True):
        report.seconds += verdict.seconds
        failed = verdict.failed(exercise)
        if Status.SKIPPED in verdict.statuses.values():
            report.problems.append(f"{case.kind} {case.name}: a test was skipped")
        if case.kind == "stub":
            report.problems += _stub_problems(exercise, verdict)
        elif case.kind == "mutant":
            report.kills[case.name] = failed
            report.sentences[case.name] = _sentence(Path(case.task.impl))
            report.problems += _mutant_problems(case, verdict, failed)
        elif failed:
            why = verdict.reason or verdict.whys.get(failed[0], "no test ran")
            report.problems.append(f"{case.kind} {case.name} must get full marks, but fails {failed[0]!r}: {why}")
        elif case.kind == "rewrite":
            report.rewrites.append(case.name)
    return _complete(report)


def _complete(report: Report) -> Report:
    killed = {part for parts in report.kills.values() for part in parts}
    report.problems += [f"part {p.name!r} fails no mutant" for p in report.exercise.parts if p.name not in killed]
    if len(report.rewrites) < REQUIRED_REWRITES:
        report.problems.append(f"has {len(report.rewrites)} right but different answers, needs {REQUIRED_REWRITES}")
    return report


def _stub_problems(exercise: Exercise, verdict: Verdict) -> list[str]:
    if verdict.end != End.FINISHED:
        return [f"stub: {verdict.end}: {verdict.reason}"]
    return [
        f"stub: part {part.name!r} is {verdict.statuses.get(part.name, Status.NOT_RUN)!s}, not {Status.NOT_STARTED!s}"
        for part in exercise.parts
        if verdict.statuses.get(part.name) != Status.NOT_STARTED
    ]


def _mutant_problems(case: Case, verdict: Verdict, failed: list[str]) -> list[str]:
    if verdict.end in (End.REFUSED, End.BROKEN, End.MISSING):
        return [f"mutant {case.name} was not graded: {verdict.end}: {verdict.reason}"]
    if bad := NOT_A_WRONG_ANSWER.intersection(verdict.errors):
        return [f"mutant {case.name} is badly written: {', '.join(sorted(bad))}"]
    return [] if failed else [f"mutant {case.name} gets full marks"]


def hole_problems(exercise: Exercise, root: Path) -> list[str]:
    """Holes that don't exist or say nothing about what they are to do."""
    problems = []
    for hole in exercise.holes:
        module = cut.Module.read(hole, root)
        try:
            node = module.find(hole.qualname)
        except CourseError as error:
            problems.append(str(error))
            continue
        if not ast.get_docstring(node):
            problems.append(f"{hole} has no docstring: an exercise's docstring is its contract")
    return problems


def _sentence(path: Path) -> str:
    """What a mutant does wrong: its docstring."""
    return " ".join((ast.get_docstring(ast.parse(path.read_text())) or "says nothing").split())


# the table


def table(report: Report, *, markdown: bool = False) -> str:
    """Which wrong answer fails which parts. Columns are the parts by number."""
    exercise = report.exercise
    parts = [part.name for part in exercise.parts]
    rows = [
        [report.sentences[name] if markdown else name, *("✗" if part in failed else "" for part in parts)]
        for name, failed in report.kills.items()
    ]
    heads = ["wrong answer", *(str(i) for i in range(1, len(parts) + 1))]
    legend = [f"{i}. {part.name} ({part.points})" for i, part in enumerate(exercise.parts, 1)]
    title = f"{exercise.id} · {exercise.title}"
    if markdown:
        lines = [f"### {title}", "", *legend, "", "| " + " | ".join(heads) + " |", "|---" + "|:-:" * len(parts) + "|"]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])
    width = max([len(row[0]) for row in rows] + [len(heads[0])])
    lines = [title, *(f"  {line}" for line in legend)]
    return "\n".join(
        [*lines, *(f"  {row[0]:{width}}  " + "  ".join(f"{cell:1}" for cell in row[1:]) for row in [heads, *rows])]
    )


def run_gate(exercises: Sequence[Exercise], root: Path = ROOT, *, fresh: bool = False) -> list[Report]:
    """Judge all answers to all exercises."""
    cache = Cache(Path(os.devnull) if fresh else root / ".cache" / "gate.json", root)
    with tempfile.TemporaryDirectory(prefix="minivllm-gate-") as folder:
        os.chmod(folder, 0o755)
        todo = [case for exercise in exercises for case in cases(exercise, Path(folder), root)]
        verdicts = judge(todo, cache, root)
    if not fresh:
        cache.save()
    reports = []
    for exercise in exercises:
        mine = [i for i, case in enumerate(todo) if case.exercise is exercise]
        reports.append(assess(exercise, [todo[i] for i in mine], [verdicts[i] for i in mine], root))
    return reports


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minivllm.course.gate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("exercise", nargs="*", help="ids such as kv-02 (default: all)")
    parser.add_argument("--markdown", action="store_true", help="print the kill tables for the book")
    parser.add_argument("--fresh", action="store_true", help="judge everything again, whatever the cache says")
    options = parser.parse_args(argv)
    try:
        exercises = load_manifest()
        chosen = [find_exercise(exercises, id) for id in options.exercise] or list(exercises.values())
        reports = run_gate(chosen, fresh=options.fresh)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    for report in reports:
        print(table(report, markdown=options.markdown))
        if not options.markdown:
            print(
                f"  {len(report.kills)} wrong answers, {len(report.rewrites)} right but different; {report.seconds:.1f} s"
            )
        for problem in report.problems:
            print(f"  PROBLEM: {problem}", file=sys.stderr)
    return 1 if any(report.problems for report in reports) or not reports else 0


if __name__ == "__main__":
    sys.exit(main())

"""Grade answers, each in its own process, and put the parent's records together to results."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.course import lint, sandbox, splice, tamper
from minivllm.course.confine import Limits
from minivllm.course.manifest import ROOT, CourseError, Exercise
from minivllm.course.records import End, PartRecord, Result, answer_path

EXAMPLES = 100
"""How many examples Hypothesis tries for each property, always the same ones."""

STEPS = 30
"""How many calls in a row a stateful property makes."""


@dataclass(frozen=True, slots=True)
class Task:
    """One answer to grade. `impl` is as for `--impl`. An answer that need not be `complete` leaves holes to the engine.

    `with_also` are answers to other exercises that run in the engine at the same time. `quick` is for answers that are
    trusted, where only the verdict matters: examples are not made small, and nobody looks whether the grader was changed.
    """

    exercise: Exercise
    impl: str
    complete: bool = True
    with_also: tuple[Path, ...] = ()
    quick: bool = False


@dataclass(slots=True)
class Graded:
    """A result, and the files that it depends on, relative to the root."""

    result: Result
    files: list[str]


def grade(tasks: Sequence[Task], at_once: int = 1, root: Path = ROOT) -> list[Graded]:
    """Grade all tasks; results in their order. One task's fate does not touch another's."""
    warm_up()
    looks = [_look_before(task, root) for task in tasks]
    works = [
        (_work(task, look.path, root), _limits(task.exercise))
        for task, look in zip(tasks, looks, strict=True)
        if look.result is None
    ]
    outcomes = iter(sandbox.run_jobs(works, at_once))
    graded = []
    for task, look in zip(tasks, looks, strict=True):
        one = Graded(look.result, []) if look.result is not None else _assess(task, next(outcomes))
        one.result.flags = look.flags
        graded.append(one)
    return graded


def warm_up() -> None:
    """Import here what every job needs, so that it need not import it again."""
    import hypothesis.stateful  # noqa: F401
    import pytest  # noqa: F401

    import minivllm.course.plugin  # noqa: F401


def _limits(exercise: Exercise) -> Limits:
    return Limits(exercise.seconds, int(exercise.memory_gib * 2**30), exercise.processes)


@dataclass(slots=True)
class Look:
    """What there is to say before anything runs: the file, what a human should look at, and a result if that decides."""

    path: Path | None = None
    flags: list[str] = field(default_factory=list)
    result: Result | None = None


def _look_before(task: Task, root: Path) -> Look:
    if task.impl == "engine":
        return Look()
    try:
        path = answer_path(task.exercise, task.impl, root)
    except CourseError as error:
        return Look(result=Result.assemble(task.exercise, task.impl, [], End.MISSING, str(error)))
    findings = lint.inspect_answer(path, task.exercise, complete=task.complete)
    look = Look(path, findings.flags)
    if findings.refused:
        look.result = Result.assemble(task.exercise, task.impl, [], End.REFUSED, "; ".join(findings.refused))
    return look


# in the child


def _work(task: Task, path: Path | None, root: Path) -> sandbox.Work:
    """What the forked process does: check that the answer fits, then run the grader and report through `emit`."""

    def work(emit: sandbox.Emit) -> None:
        impl = "engine"
        if path is not None:
            impl = str(path)
            if root / "solutions" not in path.parents:
                tamper.forbid_reading(root / "solutions")
            try:
                finder = splice.Finder.read([path, *task.with_also])
                finder.check()
            except CourseError as error:
                emit(f"broken {error}")
                return
        run_grader(task, impl, emit, root)

    return work


def run_grader(task: Task, impl: str, emit: sandbox.Emit, root: Path) -> None:
    """Run an exercise's grader with pytest in this process."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    arguments = ["-q", "--tb=no", "-p", "no:cacheprovider", "-c", str(root / "pyproject.toml"), f"--rootdir={root}"]
    arguments += ["-o", "faulthandler_timeout=0"]  # its thread would count as a process; time is watched from outside
    arguments += [f"--impl={impl}", *(f"--with-also={path}" for path in task.with_also)]
    pytest.main([*arguments, str(root / task.exercise.test_file)], plugins=[Reporter(task, emit, root)])


class Reporter:
    """A pytest plugin that sends records to the parent, and says so when what grades was changed."""

    def __init__(self, task: Task, emit: sandbox.Emit, root: Path) -> None:
        self.task = task
        self.emit = emit
        self.root = root
        self.before: tamper.Fingerprint = {}

    def pytest_collection(self, session: Any) -> None:
        """Before the grader, and with it the student's file, is imported."""
        session.config.pluginmanager.get_plugin("course-grading").serve(self.task.exercise)
        _load_profile(shrink=not self.task.quick)
        if not self.task.quick:
            self.before = tamper.fingerprint()

    def pytest_collectreport(self, report: Any) -> None:
        """A grader that can't be imported: the student's top-level code failed, or the grader is wrong."""
        if report.failed:
            self.emit(f"broken {_last_error(str(report.longrepr))}")

    def pytest_collection_finish(self, session: Any) -> None:
        """The student's top-level code has run. Say how many tests there are."""
        self._compare()
        self.emit(f"tests {len(session.items)}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Send what became of a test."""
        for key, value in report.user_properties:
            if key == "part":
                self.emit(f"part {value}")

    def pytest_sessionfinish(self, session: Any) -> None:
        """Compare for the last time, and name the engine files that were in use."""
        self._compare()
        grading: Any = session.config.pluginmanager.get_plugin("course-grading")
        modules = dict(sys.modules)
        for world in grading.worlds.values():
            modules |= world.modules
        files = [
            m.__file__ for name, m in modules.items() if name.startswith("minivllm.") and getattr(m, "__file__", None)
        ]
        self.emit(f"files {json.dumps(sorted(str(Path(str(f)).relative_to(self.root)) for f in files))}")

    def _compare(self) -> None:
        if (change := tamper.first_change(self.before)) is not None:
            self.emit(f"tampered {change}")


def _load_profile(*, shrink: bool) -> None:
    """Always the same examples, and no explanations: those take longer than all the rest."""
    from hypothesis import HealthCheck, Phase, settings

    phases = [Phase.explicit, Phase.generate, Phase.target, *([Phase.shrink] if shrink else [])]
    settings.register_profile(
        "grade",
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=phases,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("grade")


def _last_error(text: str) -> str:
    """The error lines at the end of pytest's report of a failed import."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return " ".join(lines[-3:]) or text[-500:]


# back in the parent


def _assess(task: Task, outcome: sandbox.Outcome) -> Graded:
    """A result from the lines that a job sent."""
    records: list[PartRecord] = []
    files: list[str] = []
    tests = 0
    end, reason = outcome.end, outcome.reason
    for line in outcome.lines:
        kind, _, rest = line.partition(" ")
        if kind == "part":
            records.append(PartRecord.from_json(rest))
        elif kind == "tests":
            tests = int(rest)
        elif kind == "files":
            files = json.loads(rest)
        elif kind == "broken" and end is End.FINISHED:
            end, reason = End.BROKEN, rest
        elif kind == "tampered":
            end, reason = End.TAMPERED, f"{rest} is not what it was before the file was imported"
    if end is End.FINISHED and (len({record.test for record in records}) != tests or not tests):
        end, reason = End.EXITED, "some tests never ran: something ended the run"
    result = Result.assemble(task.exercise, task.impl, records, end, reason)
    return Graded(dataclasses.replace(result, output=outcome.output, seconds=outcome.seconds), files)

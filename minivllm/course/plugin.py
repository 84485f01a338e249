"""pytest plugin: run the graders on the engine or on somebody's answers.

    pytest tests/exercises                              # the engine, which must pass
    pytest tests/exercises -k kv_02 --impl exercises    # your answer

`@pytest.mark.part("kv-02", "the name of a part")` says which part a test belongs to. A grader `test_kv_02.py` sees the
engine with the answer to kv-02 spliced in and everything else as it is, whatever other graders run in the same process:
each gets an engine of its own, imported afresh.
"""

from __future__ import annotations

import linecache
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

import minivllm
from minivllm.course import splice
from minivllm.course.expect import DUE, comparison
from minivllm.course.manifest import ROOT, CourseError, Exercise, load_manifest
from minivllm.course.records import PartRecord, Status, answer_path


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("course")
    group.addoption(
        "--impl", default="engine", help="whose code to grade: engine (default), exercises, solutions, or a path"
    )
    group.addoption("--with-also", action="append", default=[], help="further files to splice into the same engine")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "part(exercise, name): the part of an exercise that a test belongs to")
    config.pluginmanager.register(
        Grading(config.getoption("--impl"), config.getoption("--with-also")), "course-grading"
    )


class World:
    """An engine of its own: the modules imported while it was the current one, with some answers spliced in."""

    def __init__(self, finder: splice.Finder) -> None:
        self.finder = finder
        self.modules: dict[str, ModuleType] = {}

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the engine that imports find."""
        outside = _swap_engine(self.modules)
        splice.activate(self.finder)
        try:
            yield
        finally:
            splice.uninstall()
            self.modules = _swap_engine(outside)


def _swap_engine(modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Put other engine modules into `sys.modules`; returns those that were there. `config` and the course stay."""
    old = {name: module for name, module in sys.modules.items() if _is_engine(name)}
    for name in old:
        del sys.modules[name]
    sys.modules.update(modules)
    for name in {name.split(".")[1] for name in (*old, *modules)}:
        vars(minivllm).pop(name, None)
        if (module := modules.get(f"minivllm.{name}")) is not None:
            setattr(minivllm, name, module)
    return old


def _is_engine(name: str) -> bool:
    return name.startswith("minivllm.") and name.split(".")[1] not in ("course", "config")


class OutOfTime(BaseException):
    """No `Exception`, which Hypothesis would catch, shrink and so run again."""


class Grading:
    """The hooks. `impl` is what `--impl` says; `also` are files to splice in whatever exercise is graded."""

    def __init__(self, impl: str, also: list[str]) -> None:
        self.impl = impl
        self.also = [Path(path) for path in also]
        self.quiet = impl == "engine"
        self.late: set[tuple[str, str]] = set()
        self.worlds: dict[Path, World] = {}
        self.records: list[PartRecord] = []
        self.in_part = False
        self._exercises: dict[str, Exercise] | None = None

    @property
    def exercises(self) -> dict[str, Exercise]:
        if self._exercises is None:
            self._exercises = load_manifest()
        return self._exercises

    def serve(self, exercise: Exercise) -> None:
        """Work for a grader in another process, which says what this exercise's limits are and prints by itself."""
        self._exercises = {exercise.id: exercise}
        self.quiet = True

    def exercise_of(self, path: Path) -> Exercise | None:
        """The exercise that a test file grades, if it does."""
        if path.parent != ROOT / "tests" / "exercises":
            return None
        return next((e for e in self.exercises.values() if path.name == Path(e.test_file).name), None)

    def world_of(self, path: Path) -> World | None:
        """The engine that a test file is to see; None: the one that everybody sees."""
        if self.impl == "engine" or (exercise := self.exercise_of(path)) is None:
            return None
        if path not in self.worlds:
            self.worlds[path] = World(splice.Finder.read([answer_path(exercise, self.impl), *self.also]))
        return self.worlds[path]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """Import a grader within its world."""
        try:
            world = self.world_of(collector.path) if isinstance(collector, pytest.Module) else None
        except CourseError as error:
            raise pytest.UsageError(str(error)) from None
        if world is None:
            return (yield)
        with world.current():
            return (yield)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Every `part` mark must name a part of the manifest."""
        for item in items:
            if (mark := item.get_closest_marker("part")) is not None:
                exercise = self.exercises.get(mark.args[0])
                if exercise is None or mark.args[1] not in [part.name for part in exercise.parts]:
                    raise pytest.UsageError(f"{item.nodeid}: exercises/manifest.toml has no part {mark.args}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a grader's test within its world."""
        world = self.worlds.get(item.path)
        if world is None:
            return (yield)
        with world.current():
            return (yield)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A part that ran out of time once is lost: its other tests would only take longer."""
        mark = item.get_closest_marker("part")
        if mark is not None and mark.args in self.late:
            pytest.skip("this part is out of time")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Stop a part's test after the exercise's time limit."""
        mark = item.get_closest_marker("part")
        if mark is None:
            return (yield)
        self.in_part = True
        try:
            with _time_limit(item, self.exercises[mark.args[0]].part_seconds):
                return (yield)
        finally:
            self.in_part = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        """In a part's test say what came and what was expected; other tests show what pytest shows."""
        return comparison(left, right) if self.in_part and op == "==" else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Attach what a report card needs to the report of a part's test."""
        report: Any = yield
        mark = item.get_closest_marker("part")
        if mark is not None and (call.when == "call" or call.excinfo is not None):
            world = self.worlds.get(item.path)
            record = _record(mark.args, item, call, world.finder.files if world else [])
            if record.status is Status.TIMEOUT:
                self.late.add(mark.args)
            report.user_properties.append(("part", record.to_json()))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the records, for the summary."""
        self.records += [PartRecord.from_json(str(value)) for key, value in report.user_properties if key == "part"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print a report card for each exercise, unless the engine itself was tested."""
        if self.quiet:
            return
        from minivllm.course.card import print_card
        from minivllm.course.records import End, Result

        for id in dict.fromkeys(record.exercise for record in self.records):
            mine = [record for record in self.records if record.exercise == id]
            print_card(Result.assemble(self.exercises[id], self.impl, mine, End.FINISHED))


@contextmanager
def _time_limit(item: pytest.Item, seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the running code after `seconds`, and again each second in case something caught it."""

    def stop(_signal: int, frame: FrameType | None) -> None:
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "unknown"
        item.stash[LATE] = f"stopped after {seconds:g} s, in {place}: an endless loop?"
        raise OutOfTime(item.stash[LATE])

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


LATE = pytest.StashKey[str]()

EXAMPLE_HEADS = ("Falsifying example", "Failing test case")
"""What Hypothesis writes before an example, in its older and newer versions."""

NOISE = re.compile(r"\s*(self=|<state machine>|state\.(agrees_with_the_model|teardown)\(\))")
"""Lines of an example that say nothing: a stateful test compares with its model after every call."""


def _record(names: tuple[str, str], item: pytest.Item, call: pytest.CallInfo[None], files: list[Path]) -> PartRecord:
    """What became of one test of a part."""
    record = PartRecord(
        names[0], names[1], item.nodeid.partition("::")[2], Status.PASSED, seconds=round(call.duration, 3)
    )
    if (late := item.stash.get(LATE, None)) is not None:
        record.status, record.why = Status.TIMEOUT, late
    elif call.excinfo is not None:
        _describe(record, _first_error(call.excinfo.value), files)
    return record


def _first_error(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _describe(record: PartRecord, error: BaseException, files: list[Path]) -> None:
    """Status, sentence, counterexample and place of a failure; of what is not written yet only the first two."""
    text = re.sub(r"[\w.<>]*<locals>\.", "", str(error))  # who reads it doesn't know where a test defines its doubles
    record.error = type(error).__name__
    record.status = Status.FAILED
    if isinstance(error, pytest.skip.Exception):
        record.status = Status.SKIPPED
    elif isinstance(error, NotImplementedError) and text.startswith(f"{record.exercise}:"):
        record.status, record.why = Status.NOT_STARTED, f"{text.partition(': ')[2]} is not written yet"
        return
    notes = getattr(error, "__notes__", [])
    record.counterexample = _counterexample(notes)
    record.where = _place(error, {str(file) for file in files})
    message, _, detail = text.partition("\nassert ")
    if isinstance(error, AssertionError) and message and not message.startswith("assert "):
        record.why, record.detail = message.strip(), _compared(detail)
    else:
        due = next((note.removeprefix(DUE) + ", but " for note in notes if note.startswith(DUE)), "")
        who = "your code raised" if record.where else "what your code gave back or left behind led to"
        record.why = f"{due}{who} {record.error}{f': {text}' if text else _line_of(error)}"


def _compared(detail: str) -> str:
    """What came and what was expected; other explanations of pytest's repeat the test's source, and are left out."""
    ours = detail.startswith(("came:", "first difference"))
    return "\n".join(line.strip() for line in detail.splitlines()) if ours else ""


def _line_of(error: BaseException) -> str:
    """For an exception without a message: the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = trace and linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip()
    return f" at `{line}`" if line else ""


def _counterexample(notes: list[str]) -> str:
    """Hypothesis's smallest failing example, with values drawn and calls made on the way; empty if there is none."""
    kept = []
    for note in notes:
        head, _, rest = note.partition(":")
        if head in EXAMPLE_HEADS:
            lines = rest.strip().splitlines()
            kept += [line for line in lines if not NOISE.match(line)]
        elif head.startswith(("Draw ", "state")) and not NOISE.match(note):
            kept.append(note)
    return "\n".join(kept)


def _place(error: BaseException, files: set[str]) -> str:
    """File and line of the innermost frame in a student's file."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in files:
            place = f"{Path(code.co_filename).name}:{trace.tb_lineno}, in {code.co_name}"
        trace = trace.tb_next
    return place

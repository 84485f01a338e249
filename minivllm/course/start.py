"""An exercise against the clock: `python -m minivllm grade --start kv-01 --blank --timed 25`.

As in a coding interview: a file with signature and contract only, a deadline that can be seen, and a grade when time is up or
when Enter is pressed.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minivllm.course.card import print_card
from minivllm.course.grading import Task, grade
from minivllm.course.manifest import ROOT, CourseError, Exercise
from minivllm.course.records import Result


@dataclass(frozen=True, slots=True)
class Desk:
    """What a session touches of the world. `clock()` are seconds since the epoch; `wait(seconds)` says whether Enter was
    pressed meanwhile; `tell(text)` replaces the line that shows the time."""

    clock: Callable[[], float]
    wait: Callable[[float], bool]
    tell: Callable[[str], None]
    grade: Callable[[Exercise, Path], Result]


def sit(exercise: Exercise, path: Path, minutes: float, desk: Desk) -> Result:
    """Wait for Enter or the deadline and grade; before the deadline, and short of full marks, go on. The last grade counts."""
    deadline = desk.clock() + 60 * minutes
    while (left := deadline - desk.clock()) > 0:
        desk.tell(f"{clock_face(left)} left for {path.name} · Enter grades · Ctrl-C gives up")
        if desk.wait(min(left, 1.0)):
            desk.tell("grading ...")
            result = desk.grade(exercise, path)
            if result.full:
                return result
    desk.tell("time is up: grading ...\n")
    return desk.grade(exercise, path)


def clock_face(seconds: float) -> str:
    """Minutes and seconds, rounded up: `24:59`."""
    whole = -int(-seconds // 1)
    return f"{whole // 60}:{whole % 60:02}"


def blank_file(exercise: Exercise, root: Path = ROOT) -> Path:
    """Write `blank/kv_01_block_pool.py`: signature and contract, no list of what is graded. Raises `CourseError` if there is
    one already: it may be somebody's work."""
    path = root / "blank" / exercise.file_name
    if path.exists():
        raise CourseError(
            f"{path.relative_to(root)} is there already: move it away to start again, or grade it: "
            f"python -m minivllm grade {exercise.id} --impl blank"
        )
    path.parent.mkdir(exist_ok=True)
    path.write_text(contract_only(_stub(exercise, root), exercise))
    return path


def _stub(exercise: Exercise, root: Path) -> str:
    """The untouched stub. A tree handed out to students can't cut it from its engine and has it as a file."""
    kept = root / "exercises" / "stubs" / exercise.file_name
    if kept.exists():
        return kept.read_text()
    from minivllm.course.cut import cut

    return cut(exercise, root)[0]


def contract_only(stub: str, exercise: Exercise) -> str:
    """A stub without its head's parts, points and help."""
    body = stub.partition('\n"""\n')[2].partition("\n")[2]  # the line between is the stub's stamp
    return f'"""{exercise.id} · {exercise.title}"""\n{body}'


def start(exercise: Exercise, minutes: float, *, blank: bool, root: Path = ROOT) -> int:
    """A session in the terminal; the exit status is that of grading, or 130 after Ctrl-C."""
    path = blank_file(exercise, root) if blank else root / "exercises" / exercise.file_name
    until = time.strftime("%H:%M", time.localtime(time.time() + 60 * minutes))
    print(f"open {path.relative_to(root)} in your editor and write; time ends at {until}")
    try:
        result = sit(exercise, path, minutes, Desk(time.time, wait_for_enter, tell, grade_and_show))
    except KeyboardInterrupt:
        print(f"\ngiven up; {path.relative_to(root)} stays as it is")
        return 130
    return 0 if result.full else 1


def wait_for_enter(seconds: float) -> bool:
    """Whether a line arrives on standard input within that time. Without a terminal only the time passes."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    if select.select([sys.stdin], [], [], seconds)[0]:
        sys.stdin.readline()
        return True
    return False


def tell(text: str) -> None:
    """Overwrite the line on a terminal; elsewhere only what ends a line is said."""
    if sys.stdout.isatty() or text.endswith("\n"):
        print(f"\r\033[K{text}" if sys.stdout.isatty() else text, end="", flush=True)


def grade_and_show(exercise: Exercise, path: Path) -> Result:
    """Grade a file and print its card."""
    result = grade([Task(exercise, str(path))])[0].result
    print()
    print_card(result)
    return result

"""Grade answers: `python -m minivllm.course.grade kv-02`; without an exercise, all of them.

Each exercise runs in a process of its own with limits (`minivllm.course.sandbox`), against the engine's own version of
everything else. The exit status is 0 if every exercise got full marks, 1 if not, 2 if the request makes no sense.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from minivllm.course import exports
from minivllm.course.card import print_card, print_total
from minivllm.course.confine import weak_spot
from minivllm.course.grading import Task, grade
from minivllm.course.manifest import CourseError, Exercise, find_exercise, load_manifest
from minivllm.course.progress import note_passed
from minivllm.course.records import End, Result, answer_path
from minivllm.course.start import start


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        exercises = choose(options.exercise)
        if options.start:
            return start(choose([options.start])[0], options.timed, blank=options.blank)
        if options.blank:
            raise CourseError("--blank goes with --start ID: grade --start kv-01 --blank --timed 25")
        if options.submissions:
            return grade_class(options, exercises)
        if options.watch:
            return watch(options, exercises)
        return once(options, exercises)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minivllm.course.grade", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("exercise", nargs="*", help="ids such as kv-02 (default: all)")
    add("--impl", default="exercises", help="exercises (default), solutions, engine, a folder or a file")
    add("--hint", action="count", default=0, help="show a hint; repeat for more")
    add("--json", type=Path, metavar="PATH", help="write Gradescope's results.json")
    add("--junit", type=Path, metavar="PATH", help="write JUnit XML")
    add("--classroom", action="store_true", help="print GitHub Classroom's result and nothing else")
    add("--watch", action="store_true", help="grade again whenever a file changes")
    add("--start", metavar="ID", help="work on one exercise against the clock")
    add("--blank", action="store_true", help="with --start: in an empty file, signature and contract only")
    add("--timed", type=float, default=25, metavar="MIN", help="with --start: minutes to its deadline (default: 25)")
    add("--mine", action="store_true", help="put all exercises you have finished into one engine and grade that")
    add(
        "--submissions",
        type=Path,
        metavar="DIR",
        help="grade a class: one folder a student, with files as in exercises/",
    )
    add("--csv", type=Path, metavar="OUT", help="where --submissions writes its table (default: grades.csv)")
    return parser


def choose(ids: Sequence[str]) -> list[Exercise]:
    """The exercises of those ids, or all."""
    exercises = load_manifest()
    return [find_exercise(exercises, id) for id in ids] or list(exercises.values())


def once(options: argparse.Namespace, exercises: Sequence[Exercise]) -> int:
    """Grade, print, write."""
    results = grade_together(options, exercises) if options.mine else grade_each(options.impl, exercises)
    if options.impl == "exercises":
        note_passed(results)  # from now on lessons show these bodies
    if options.classroom:
        print(exports.classroom(results))
    else:
        report(results, options)
    if options.json:
        warn_of_weak_spot()
        options.json.write_text(exports.gradescope(results))
    if options.junit:
        options.junit.write_text(exports.junit(results))
    return 0 if results and all(result.full for result in results) else 1


def grade_each(impl: str, exercises: Sequence[Exercise]) -> list[Result]:
    """One result for each exercise; some run at the same time."""
    tasks = [Task(exercise, impl) for exercise in exercises]
    return [graded.result for graded in grade(tasks, at_once=os.cpu_count() or 1)]


def grade_together(options: argparse.Namespace, exercises: Sequence[Exercise]) -> list[Result]:
    """Grade each; then those with full marks again, all of them in one engine. Only these are reported."""
    done = [result.exercise for result in grade_each(options.impl, exercises) if result.full]
    if not done:
        print("no exercise is finished yet")
        return []
    paths = {exercise.id: answer_path(exercise, options.impl) for exercise in done}
    others = {e.id: tuple(path for id, path in paths.items() if id != e.id) for e in done}
    tasks = [Task(exercise, str(paths[exercise.id]), with_also=others[exercise.id]) for exercise in done]
    print(f"one engine with your {', '.join(paths)}")
    return [graded.result for graded in grade(tasks, at_once=os.cpu_count() or 1)]


def report(results: Sequence[Result], options: argparse.Namespace) -> None:
    """Cards for what was begun; a table for many."""
    for result in results:
        if len(results) == 1 or not (result.full or result.untouched or result.end is End.MISSING):
            print_card(result, hints=options.hint)
    if len(results) > 1:
        print_total(results)


def watch(options: argparse.Namespace, exercises: Sequence[Exercise]) -> int:
    """Grade whenever one of the files changes, until Ctrl-C."""
    seen: dict[Path, float] = {}
    try:
        while True:
            now = {p: p.stat().st_mtime for p in (answer_path(e, options.impl) for e in exercises) if p.exists()}
            if now != seen:
                changed = [e for e in exercises if now.get(p := answer_path(e, options.impl)) != seen.get(p)]
                seen = now
                os.system("clear" if os.name == "posix" else "cls")
                once(options, changed)
                print("watching; Ctrl-C ends")
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 0


def grade_class(options: argparse.Namespace, exercises: Sequence[Exercise]) -> int:
    """Grade every student's folder and write one line for each."""
    folders = sorted(options.submissions.glob("*/"))
    if not folders:
        raise CourseError(f"--submissions {options.submissions}: has no folders; it needs one for each student")
    tasks = [Task(exercise, str(folder)) for folder in folders for exercise in exercises]
    results = [graded.result for graded in grade(tasks, at_once=os.cpu_count() or 1)]
    size = len(exercises)
    classes = {folder.name: results[i * size : (i + 1) * size] for i, folder in enumerate(folders)}
    path = options.csv or Path("grades.csv")
    exports.write_csv(path, classes)
    print(f"{path}: {len(folders)} students, {size} exercises")
    warn_of_weak_spot()
    return 0


def warn_of_weak_spot() -> None:
    """Tell whoever grades others' work when this machine protects less than it could."""
    if (weak := weak_spot()) is not None:
        print(f"note: {weak}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

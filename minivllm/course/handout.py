"""Write a tree for students: `python -m minivllm.course.handout DIR [--gradescope ZIP] [ID ...]`.

It has the engine, untouched stubs, graders and woven lessons, and neither solutions, wrong answers nor history. What students
are to write is there as compiled code, since all else runs on it: deterrence, not secrecy. `--gradescope` also writes an
autograder for Gradescope, which grades with the same tree, all exercises or those named.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from minivllm.course import cut
from minivllm.course.manifest import ROOT, CourseError, Exercise, find_exercise, load_manifest
from minivllm.course.reference import HEADER, compile_reference, dump

KEPT_BACK = frozenset(
    f"minivllm/course/{name}.py" for name in ("handout", "cut", "gate", "weave", "directives", "lint_lessons", "size")
)
"""What only works with, or would show, what students don't get."""

PATTERNS = (
    "minivllm/**/*",
    "kernels/**/*",
    "lessons/*.ipynb",
    "lessons/naive.py",
    "lessons/questions.toml",
    "exercises/manifest.toml",
    "tests/conftest.py",
    "tests/exercises/test_*.py",
    "AGENTS.md",
    "LICENSE",
    "Makefile",
    "NOTICE",
    ".gitignore",
    "pyproject.toml",
)
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

README = f"""# minivllm, the course

An inference engine to learn on. You need Python {PYTHON}, this very version: what you are going to write is in `minivllm/` already, as
compiled code, because the rest of the engine runs on it. It is there to be run. It is no secret, and reading it teaches little;
in notebooks `show(..., reveal=True)` opens nothing. To start an exercise again, copy its file from `exercises/stubs/`.

"""

CHANGES = {
    "README.md": [("Python 3.11 or newer", f"Python {PYTHON}")],
    "AGENTS.md": [("\n## Somebody changes", "\0")],
    "Makefile": [
        ("\n# The rest is for", "\0"),
        ("Python 3.11 or newer", f"Python {PYTHON}"),
        ("PY=python3.11", f"PY=python{PYTHON}"),
        ("PY ?= python3\n", f"PY ?= python{PYTHON}\n"),
        ("WANTED := >= (3, 11)", f"WANTED := == ({PYTHON.replace('.', ', ')})"),
        ("EXTRAS := dev", "EXTRAS := kernels,lessons,test"),
    ],
    "pyproject.toml": [('requires-python = ">=3.11"', f'requires-python = "=={PYTHON}.*"')],
}
"""By file: text, and what stands for it in a students' tree. What comes behind a zero byte is left out."""

SETUP = f"""#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image. Wheels in source/wheels are used instead of the network.
set -euo pipefail
AUTOGRADER=${{{{AUTOGRADER:-/autograder}}}}
if ! python{PYTHON} -m ensurepip --version >/dev/null 2>&1; then
  apt-get update && apt-get install -y python{PYTHON} python{PYTHON}-venv
fi
python{PYTHON} -m venv "$AUTOGRADER/venv"
FROM=()
if [ -d "$AUTOGRADER/source/wheels" ]; then FROM=(--no-index --find-links "$AUTOGRADER/source/wheels"); fi
"$AUTOGRADER/venv/bin/pip" install --disable-pip-version-check -q ${{{{FROM[@]+"${{{{FROM[@]}}}}"}}}} {{requirements}}
chmod -R a+rX "$AUTOGRADER/source" "$AUTOGRADER/venv"
"""

GRADER_NEEDS = ("pytest>=9", "hypothesis>=6.150", "psutil>=6", "rich>=14")
LOAD = """
import runpy, sys
class NotInstalled:
    def find_spec(self, name, *_):
        if name in sys.argv[1].split(","):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NotInstalled())
sys.dont_write_bytecode = True
for path in sys.argv[2:]:
    runpy.run_path(path)
"""
"""Loads graders where the packages named first are not installed, for all that they can see."""

CPU_TORCH = "--extra-index-url=https://download.pytorch.org/whl/cpu"

RUN = """#!/usr/bin/env bash
# Gradescope runs this for each submission. Points lost are no error: it fails only if there is no result.
AUTOGRADER=${{AUTOGRADER:-/autograder}}
PYTHON=${{PYTHON:-$AUTOGRADER/venv/bin/python}}
cd "$AUTOGRADER/source" || exit 1
chmod -R a+rX "$AUTOGRADER/submission"
mkdir -p "$AUTOGRADER/results"
"$PYTHON" -m minivllm.course.grade {ids} --impl "$AUTOGRADER/submission" --json "$AUTOGRADER/results/results.json"
[ -s "$AUTOGRADER/results/results.json" ]
"""


def hand_out(target: Path, root: Path = ROOT) -> None:
    """Write the students' tree into a folder that is missing or empty. Raises `CourseError` if it is not."""
    if target.exists() and any(target.iterdir()):
        raise CourseError(f"{target} is not empty: name a folder that does not exist yet")
    for path in files(root):
        copy = target / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    exercises = load_manifest(root)
    (target / "exercises" / "stubs").mkdir()
    for exercise in exercises.values():
        for folder in ("exercises", "exercises/stubs"):
            (target / folder / exercise.file_name).write_text(cut.cut(exercise, root)[0])
    take_out(list(exercises.values()), target)
    (target / "README.md").write_text(README + student_page(root))
    for name, changes in CHANGES.items():
        change(target / name, changes)


def change(path: Path, changes: Sequence[tuple[str, str]]) -> None:
    """Replace text in a file. Raises `CourseError` where the text is not there any more."""
    text = path.read_text()
    for old, new in changes:
        if old not in text:
            raise CourseError(f"{path.name} has no {old!r} any more: bring CHANGES in {__name__} up to date")
        text = text.replace(old, new)
    path.write_text(text.partition("\0")[0])


def files(root: Path = ROOT) -> Iterator[Path]:
    """The files that students get as they are (those with holes are changed afterwards)."""
    for pattern in PATTERNS:
        for path in sorted(root.glob(pattern)):
            name = str(path.relative_to(root))
            if path.is_file() and "__pycache__" not in path.parts and name not in KEPT_BACK:
                yield path


def student_page(root: Path = ROOT) -> str:
    """The book's page for students, without its title."""
    return (root / "book" / "pages" / "student.md").read_text().partition("\n")[2].lstrip()


def take_out(exercises: Sequence[Exercise], tree: Path) -> None:
    """Replace all holes in a tree's engine by compiled references."""
    modules: dict[str, list[tuple[str, str]]] = {}
    for exercise in exercises:
        for hole in exercise.holes:
            modules.setdefault(hole.path, []).append((hole.qualname, exercise.id))
    for path, holes in modules.items():
        hide(tree / path, holes)


def hide(path: Path, holes: Sequence[tuple[str, str]]) -> None:
    """Take the bodies of some definitions, each with its exercise's id, out of a module, and write them beside it."""
    text = path.read_text()
    module = cut.Module(path.stem, text.splitlines(keepends=True), ast.parse(text))
    nodes = {name: module.find(name) for name, _ in holes}
    path.with_suffix(".ref").write_bytes(dump({name: compile_reference(node, name) for name, node in nodes.items()}))
    lines = list(module.lines)
    for name, id in sorted(holes, key=lambda hole: -nodes[hole[0]].lineno):
        node = nodes[name]
        mark = f'{" " * node.col_offset}@_reference("{name}")\n'
        lines[cut.first_line(node) - 1 : node.end_lineno] = [mark, *cut.blank(module, node, name, id)]
    head = _end_of_head(module.tree)
    lines.insert(head, f"\n{HEADER}")
    path.write_text("".join(lines))


def _end_of_head(tree: ast.Module) -> int:
    """How many lines docstring and imports from the future take."""
    last = 0
    for statement in tree.body:
        match statement:
            case ast.Expr(ast.Constant()) | ast.ImportFrom(module="__future__"):
                last = statement.end_lineno or 0
            case _:
                break
    return last


def gradescope(tree: Path, archive: Path, ids: Sequence[str] = ()) -> None:
    """Pack a students' tree, without lessons, as a Gradescope autograder. Source: Gradescope autograder documentation,
    "Autograder specifications": setup.sh and run_autograder at the top; submission in, results/results.json out."""
    exercises = load_manifest(tree)
    needs = requirements(tree, [exercises[id] for id in ids or exercises])
    setup = SETUP.format(requirements=" ".join(f"'{need}'" for need in needs))
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path in sorted(tree.rglob("*")):
            inside = path.relative_to(tree)
            if path.is_file() and inside.parts[0] != "lessons" and "__pycache__" not in inside.parts:
                zipped.write(path, str(inside))
        for name, text in (("setup.sh", setup), ("run_autograder", RUN.format(ids=" ".join(ids)))):
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o100755 << 16
            zipped.writestr(info, text)


def requirements(tree: Path, exercises: Sequence[Exercise]) -> list[str]:
    """What pip is to install for grading: four packages, and all of the engine's if a grader imports one of those."""
    engine = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["dependencies"]
    more = {need.partition(">=")[0].partition("==")[0] for need in engine} - {"psutil", "rich"}
    words = [sys.executable, "-c", LOAD, ",".join(more), *(exercise.test_file for exercise in exercises)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(words, cwd=tree, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode and "ModuleNotFoundError" not in done.stderr:
        raise CourseError(f"a grader can't be loaded: {done.stderr.strip()}")
    return [*GRADER_NEEDS, *engine, CPU_TORCH] if done.returncode else list(GRADER_NEEDS)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minivllm.course.handout", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write the tree")
    parser.add_argument("exercise", nargs="*", help="what Gradescope is to grade (default: all)")
    parser.add_argument("--gradescope", type=Path, metavar="ZIP", help="also write an autograder")
    options = parser.parse_args(argv)
    try:
        ids = [find_exercise(load_manifest(), id).id for id in options.exercise]
        hand_out(options.folder)
        if options.gradescope:
            gradescope(options.folder, options.gradescope, ids)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.folder}: for students; what they are to write is in it compiled, which deters and keeps no secret")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a lesson may not do: define again what the engine defines, or leave traces of the machine that wove it.

python -m minivllm.course.lint_lessons
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from minivllm.course.manifest import ROOT
from minivllm.course.source import DEFINITIONS
from minivllm.course.weave import Cell, lesson_sources, notebook_of, read_cells

MAX_COLUMNS = 90
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|/tmp/|/home/\w+|/root/")


def engine_names() -> dict[str, str]:
    """Every class and function that a module of the engine defines at its top level, and where. Private ones are free."""
    names: dict[str, str] = {}
    for path in sorted((ROOT / "minivllm").rglob("*.py")):
        if "course" in path.parts:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
                names.setdefault(node.name, str(path.relative_to(ROOT)))
    return names


def defined_names(code: str) -> list[str]:
    """Classes and functions that a cell or module defines, at any depth. IPython's magics are left out."""
    python = "\n".join(line for line in code.splitlines() if not line.startswith(("%", "!")))
    return [node.name for node in ast.walk(ast.parse(python)) if isinstance(node, DEFINITIONS)]


def redefined(code: str, names: dict[str, str]) -> list[str]:
    """Problems of a cell: an engine's name defined again, unless it says `naive_` or the cell is a solution."""
    if code.startswith("%%solve"):
        return []
    return [
        f"defines {name}, which {names[name]} defines: import it, or call yours naive_{name}"
        for name in defined_names(code)
        if name in names
    ]


def lint_cells(cells: list[Cell], names: dict[str, str]) -> list[str]:
    """Problems of a lesson's code cells, each with its cell."""
    code = [cell for cell in cells if cell.kind == "code"]
    problems = [f"{cell.id}: {problem}" for cell in code for problem in redefined(cell.source, names)]
    problems += [
        f"{cell.id}: a line of {max(map(len, cell.source.splitlines()))} characters; the book shows {MAX_COLUMNS}"
        for cell in code
        if max(map(len, cell.source.splitlines())) > MAX_COLUMNS
    ]
    if not any(re.search(r"^\s*assert ", cell.source, re.M) for cell in code):
        problems.append("no cell asserts anything: every claim in the prose needs a cell that holds it")
    return problems


def lint_notebook(path: Path) -> list[str]:
    """Problems of a woven notebook: addresses and paths of one machine, errors that were not asked for."""
    if not path.exists():
        return [f"{path.name} is missing: python -m minivllm.course.weave"]
    found = _ADDRESS.search(path.read_text(encoding="utf-8"))
    return [f"{path.name} holds {found[0]!r}, which is only true on one machine"] if found else []


def lint() -> list[str]:
    """All problems of all lessons, one a line; empty if there are none."""
    names = engine_names()
    problems = [
        f"lessons/naive.py: {problem}" for problem in redefined((ROOT / "lessons" / "naive.py").read_text(), names)
    ]
    for source in lesson_sources():
        problems += [f"{source.name}: {problem}" for problem in lint_cells(read_cells(source), names)]
        problems += lint_notebook(notebook_of(source))
    return problems


if __name__ == "__main__":
    found = lint()
    print("\n".join(found) or "lessons: no problems")
    sys.exit(bool(found))

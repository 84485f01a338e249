"""Weave lessons: `lessons/src/NN_name.md` becomes `lessons/NN_name.ipynb`, executed, the same bytes every time.

    python -m minivllm.course.weave [--check] [NN ...]

The Markdown file is the source. It is MyST: prose, directives and code cells. Jupyter knows no directives, so the
notebook gets plain Markdown instead (`minivllm.course.directives`); the book gets the source's prose with the notebook's
outputs, and runs nothing. Cells tagged `volatile` (timings) run, but their outputs, which differ every time, are left out.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbclient
import nbformat

from minivllm.course.directives import expand, to_markdown
from minivllm.course.manifest import ROOT, CourseError

LESSONS = ROOT / "lessons"
SECONDS = 120
_LINE_NUMBER = re.compile(r"(\.py, line )\d+")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
VOLATILE_NOTE = "(differs from run to run: run this cell to see yours)\n"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class WeaveError(CourseError):
    """A lesson can't be read, or one of its cells fails."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a lesson: `markdown` or `code`. The id is the lesson's number and the cell's place: stable, and unique."""

    id: str
    kind: str
    source: str
    tags: tuple[str, ...] = ()


def lesson_sources(numbers: list[str] | None = None) -> list[Path]:
    """The lessons' sources in order; with `numbers` ("06") only those. Raises `WeaveError` for a number without a lesson."""
    found = sorted((LESSONS / "src").glob("[0-9][0-9]_*.md"))
    for number in numbers or ():
        if not any(path.name.startswith(number) for path in found):
            raise WeaveError(f"lesson {number!r} does not exist: lessons/src has {', '.join(p.stem for p in found)}")
    return [path for path in found if not numbers or path.name[:2] in numbers]


def read_cells(path: Path) -> list[Cell]:
    """A lesson's cells. Code stands in ```` ```{code-cell} ```` fences; `+++` on a line of its own ends a Markdown cell."""
    pieces: list[tuple[str, list[str]]] = [("markdown", [])]
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        inside_code = pieces[-1][0] == "code"
        if line.startswith("```{code-cell}"):
            if inside_code:
                raise WeaveError(f"{path.name}:{number}: a code cell begins inside another one")
            pieces.append(("code", []))
        elif line == ("```" if inside_code else "+++"):
            pieces.append(("markdown", []))
        else:
            pieces[-1][1].append(line)
    if pieces[-1][0] == "code":
        raise WeaveError(f"{path.name}: the last code cell has no closing fence")
    filled = [(kind, lines) for kind, lines in pieces if any(line.strip() for line in lines)]
    return [_cell(f"{path.stem[:2]}-{i:02d}", kind, lines) for i, (kind, lines) in enumerate(filled)]


def _cell(id: str, kind: str, lines: list[str]) -> Cell:
    tags: tuple[str, ...] = ()
    if kind == "code" and lines[0].startswith(":tags:"):
        tags = tuple(tag.strip() for tag in lines[0].partition("[")[2].rstrip("] ").split(","))
        lines = lines[1:]
    return Cell(id, kind, "\n".join(lines).strip(), tags)


def build(cells: list[Cell], prose: Callable[[str], str]) -> nbformat.NotebookNode:
    """A notebook without outputs; `prose` turns a Markdown cell's source into what its readers understand."""
    notebook = nbformat.v4.new_notebook(metadata=METADATA)
    for cell in cells:
        new = nbformat.v4.new_code_cell if cell.kind == "code" else nbformat.v4.new_markdown_cell
        node = new(cell.source if cell.kind == "code" else prose(cell.source), id=cell.id)
        if cell.tags:
            node.metadata["tags"] = list(cell.tags)
        notebook.cells.append(node)
    return notebook


def execute(notebook: nbformat.NotebookNode, name: str) -> None:
    """Run all cells in a fresh kernel, in place. Raises `WeaveError` with the cell and its error."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",  # sums come in one order, whatever the machine
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "IPYTHONDIR": scratch,  # nobody's start-up files
        }
        client = nbclient.NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(LESSONS)}},
        )
        try:
            client.execute(env=environment)
        except nbclient.exceptions.CellExecutionError as error:
            raise WeaveError(f"{name}: a cell fails\n{_ANSI.sub('', str(error))}") from None
        except nbclient.exceptions.CellTimeoutError as error:
            raise WeaveError(f"{name}: a cell takes more than {SECONDS} s\n{error}") from None


def settle(notebook: nbformat.NotebookNode) -> None:
    """Take out of the outputs what differs from run to run, in place."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if "volatile" in cell.metadata.get("tags", ()):
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=VOLATILE_NOTE)]
        cell.outputs = [_settled(output) for output in _joined(cell.outputs) if output.get("name") != "stderr"]


def _settled(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    if output.output_type == "error":  # a traceback names temporary files
        output.traceback = [f"{output.ename}: {output.evalue}"]
    return output


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Pieces of one stream as one output: how it was cut depends on the moment."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == "stream" == last.output_type and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def dump(notebook: nbformat.NotebookNode) -> str:
    """A notebook as the text of its file."""
    nbformat.validate(notebook)
    text: str = nbformat.writes(notebook)
    return text.rstrip("\n") + "\n"


def weave(path: Path) -> str:
    """The executed notebook of a lesson's source, as text."""
    notebook = build(read_cells(path), lambda source: to_markdown(expand(source)))
    execute(notebook, path.name)
    settle(notebook)
    return dump(notebook)


def notebook_of(path: Path) -> Path:
    """Where a source's notebook lives."""
    return LESSONS / f"{path.stem}.ipynb"


def is_current(path: Path) -> bool:
    """Whether a lesson's notebook has the cells of its source. Runs nothing: outputs may still be old."""
    target = notebook_of(path)
    if not target.exists():
        return False
    wanted = build(read_cells(path), lambda source: to_markdown(expand(source)))
    cells = nbformat.read(target, as_version=4).cells
    return [(c.id, c.source) for c in wanted.cells] == [(c.id, c.source) for c in cells]


def unmoved(text: str) -> str:
    """A notebook's text without the numbers of the lines where shown code stands: that code moved makes nothing stale."""
    return _LINE_NUMBER.sub(r"\1", text)


def first_difference(old: str, new: str) -> str:
    """Where two notebooks differ, for a reader of the log."""
    for before, after in zip(old.splitlines(), new.splitlines(), strict=False):
        if before != after:
            return f"committed: {before.strip()[:200]}\n    now:       {after.strip()[:200]}"
    return "one of them ends earlier"


def main(arguments: list[str] | None = None) -> int:
    """Weave, or with `--check` compare; the exit status is the number of stale notebooks, at most 1."""
    given = sys.argv[1:] if arguments is None else arguments
    check = "--check" in given
    stale = 0
    for path in lesson_sources([a for a in given if not a.startswith("-")]):
        target, new = notebook_of(path), weave(path)
        old = target.read_text(encoding="utf-8") if target.exists() else ""
        if not check:
            target.write_text(new, encoding="utf-8")
        elif unmoved(old) != unmoved(new):
            stale = 1
            print(f"{target.name} is stale\n    {first_difference(unmoved(old), unmoved(new))}")
            continue
        print(f"{target.name}: {'current' if check or old == new else 'written'}")
    return stale


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CourseError as error:
        sys.exit(str(error))

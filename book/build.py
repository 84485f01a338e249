"""Build the book: put its pages together, then let Sphinx make HTML that works offline, also from file://.

    python -m book.build      the book, into book/_build/html
    python -m book.build pages      only the pages Sphinx reads, into book/_build/source
    python -m book.build pdf      each page of the built book as PDF, printed by Chromium, into book/_build/pdf
    python -m book.build kills    run the gate, and write what it found into book/pages/kills.md

Chapters are the lessons' prose with the outputs of their notebooks: nothing is run again. Tables come from the calculators,
indices from the manifest and the question bank. Any warning fails the build.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

from book import tables
from minivllm.course.directives import expand
from minivllm.course.gate import run_gate
from minivllm.course.manifest import ROOT, CourseError, load_manifest
from minivllm.course.weave import build, lesson_sources, notebook_of, read_cells

BOOK = ROOT / "book"
SOURCE = BOOK / "_build" / "source"
HTML = BOOK / "_build" / "html"
COPIED = ("*.md", "pages/*.md", "decisions/*.md", "images/*", "_static/**/*")

GENERATED = {
    "chapters.md": tables.chapters,
    "pages/exercises.md": tables.exercise_index,
    "pages/questions.md": tables.question_index,
    "pages/hardware.md": tables.hardware,
    "pages/models.md": tables.models,
    "pages/errata.md": tables.errata,
    "decisions/index.md": tables.decisions,
}


def chapter(path: Path) -> str:
    """A lesson as a notebook for the book: MyST prose, and the outputs of the woven notebook. `CourseError` if that is stale."""
    notebook = build(read_cells(path), expand)
    target = notebook_of(path)
    woven = nbformat.read(target, as_version=4).cells
    outputs = {cell.id: cell for cell in woven if cell.cell_type == "code"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if cell.id not in outputs or outputs[cell.id].source != cell.source:
            raise CourseError(
                f"{target.name} is not of its source: run python -m minivllm.course.weave {path.name[:2]}"
            )
        cell.outputs, cell.execution_count = outputs[cell.id].outputs, outputs[cell.id].execution_count
    text: str = nbformat.writes(notebook)
    return text


def assemble(source: Path = SOURCE) -> None:
    """Write everything Sphinx reads. Files that did not change keep their time, so that a second build is quick."""
    wanted: dict[Path, bytes] = {}
    for pattern in COPIED:
        for file in BOOK.glob(pattern):
            if file.is_file():
                wanted[source / file.relative_to(BOOK)] = file.read_bytes()
    for name, make in GENERATED.items():
        wanted[source / name] = make().encode()
    for path in [path for path in lesson_sources() if notebook_of(path).exists()]:
        wanted[source / "lessons" / f"{path.stem}.ipynb"] = chapter(path).encode()
    for file in [f for f in source.rglob("*") if f.is_file() and f not in wanted]:
        file.unlink()
    for file, content in wanted.items():
        if not file.exists() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def run_sphinx() -> int:
    """Build the HTML; returns Sphinx's exit status. Warnings are errors."""
    command = ["-W", "--keep-going", "-q", "-b", "html", "-c", str(BOOK), str(SOURCE), str(HTML)]
    return subprocess.run([sys.executable, "-m", "sphinx", *command], check=False).returncode


def write_kills() -> int:
    """Run the gate; write its kill tables, if it found no problem."""
    reports = run_gate(list(load_manifest().values()))
    problems = [problem for report in reports for problem in report.problems]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    (BOOK / "pages" / "kills.md").write_text(tables.kill_tables(reports), encoding="utf-8")
    return 0


def print_pages(browser: str | None) -> int:
    """Print every page of the built book; returns 1, with the reason, if that can't be done."""
    found = sorted(page for page in HTML.rglob("*.html") if page.stem not in ("search", "genindex"))
    if browser is None or not found:
        print(
            "build the book first" if browser else "no Chromium here: print the pages from any browser", file=sys.stderr
        )
        return 1
    for page in found:
        target = BOOK / "_build" / "pdf" / page.relative_to(HTML).with_suffix(".pdf")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as profile:
            options = [
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-pdf-header-footer",
                "--virtual-time-budget=5000",
            ]
            command = [browser, *options, f"--user-data-dir={profile}", f"--print-to-pdf={target}", page.as_uri()]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
    print(f"{len(found)} pages: {BOOK / '_build' / 'pdf'}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """`html`, `pages`, `pdf` or `kills`."""
    given = (sys.argv[1:] if arguments is None else arguments) or ["html"]
    if given == ["kills"]:
        return write_kills()
    if given == ["pdf"]:
        return print_pages(shutil.which("chromium") or shutil.which("google-chrome"))
    if given not in (["html"], ["pages"]):
        print(__doc__)
        return 2
    assemble()
    if given == ["pages"]:
        return 0
    if status := run_sphinx():
        return status
    shutil.copytree(BOOK / "_static" / "katex" / "fonts", HTML / "_static" / "katex" / "fonts", dirs_exist_ok=True)
    print(f"the book: {HTML / 'index.html'}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CourseError as error:
        sys.exit(str(error))

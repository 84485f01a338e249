"""The book: its pages are put together from what they list, and Sphinx builds them without a warning or a foreign address."""

import re
import subprocess
import sys

import nbformat
import pytest

from book import build as book
from book import tables as pages
from minivllm.calc.hw import DEVICES
from minivllm.course.gate import Report
from minivllm.course.manifest import ROOT, CourseError, load_manifest
from minivllm.course.quantities import calculate, read_quantities
from minivllm.course.questions import load_bank
from minivllm.course.weave import lesson_sources, read_cells


def test_every_exercise_question_and_machine_is_listed():
    exercises, questions, machines = pages.exercise_index(), pages.question_index(), pages.hardware()
    assert all(f"({e.id})=" in exercises for e in load_manifest().values())
    assert all(f"(row-{q.id.lower()})=" in questions for q in load_bank().questions)
    assert all(device.name in machines for device in DEVICES)


def test_symbols_are_listed_with_the_line_they_stand_in():
    found = re.search(r"`BlockPool.free` \(minivllm/kv/block_pool.py, line (\d+)\)", pages.exercise_index())
    assert found
    lines = (ROOT / "minivllm" / "kv" / "block_pool.py").read_text().splitlines()
    assert "def free(" in lines[int(found[1]) - 1]


def test_chapters_link_to_what_is_written_and_name_the_rest():
    text = pages.chapters()
    for chapter in load_bank().chapters:
        assert chapter.title in text
        notebook = pages.woven(chapter)
        assert notebook is None or f"(lessons/{notebook.name})" in text


ERRATA = pages.load_errata()
each_erratum = pytest.mark.parametrize("entry", ERRATA, ids=lambda entry: entry["title"])


@each_erratum
def test_an_erratum_says_what_is_said_where_what_is_right_and_how_we_know(entry):
    assert entry["kind"] in pages.KINDS
    assert all(entry[field].strip() for field in ("title", "where", "said", "right", "how"))
    rows = {question.id for question in load_bank().questions}
    assert set(entry.get("rows", [])) <= rows
    assert f"### {entry['title']}" in pages.errata()


@each_erratum
def test_numbers_of_an_erratum_follow_from_their_formulas(entry):
    for formula, quoted in entry.get("numbers", []):
        assert quoted in entry["right"] + entry["how"]
        assert next(read_quantities(quoted)).plain == pytest.approx(calculate(formula), rel=0.035), formula


def test_tests_that_errata_name_exist():
    named = {name for entry in ERRATA for name in re.findall(r"`(test_\w+)`", entry["how"])}
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "course").glob("test_*.py"))
    assert named
    assert [name for name in named if f"def {name}(" not in text] == []


def test_first_fit_decreasing_takes_four_bins_where_three_do():
    items, bins = [44, 24, 24, 22, 21, 17, 8, 8, 6, 6], [[]]
    for item in sorted(items, reverse=True):
        room = next((b for b in bins if sum(b) + item <= 61), None)
        if room is None:
            bins.append(room := [])
        room.append(item)
    best = [[44, 17], [24, 22, 8, 6], [24, 21, 8, 6]]
    assert sorted(item for b in best for item in b) == sorted(items)
    assert all(sum(b) <= 61 for b in best)
    assert len(bins) == 4


def test_bars_in_cells_do_not_break_a_table():
    assert pages.table(["a"], [["x | y"]]).splitlines()[-1] == "| x \\| y |"


def test_kill_tables_have_a_row_a_wrong_answer_and_a_cross_where_it_fails():
    exercise = load_manifest()["kv-02"]
    report = Report(exercise, {"m": [exercise.parts[1].name]}, {"m": "Forgets a | b."}, ["rewrite"])
    text = pages.kill_tables([report])
    assert "1 so far" in text
    assert "| Forgets a \\| b. |  | ✗ |" in text


def test_a_chapter_has_the_sources_prose_and_the_notebooks_outputs():
    source = lesson_sources(["06"])[0]
    notebook = nbformat.reads(book.chapter(source), as_version=4)
    assert [cell.id for cell in notebook.cells] == [cell.id for cell in read_cells(source)]
    assert any(":::{dropdown}" in cell.source for cell in notebook.cells)
    assert any(cell.get("outputs") for cell in notebook.cells)


def test_a_chapter_whose_notebook_is_stale_is_refused(monkeypatch, tmp_path):
    stale = tmp_path / "stale.ipynb"
    stale.write_text(book.notebook_of(lesson_sources(["03"])[0]).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(book, "notebook_of", lambda path: stale)
    with pytest.raises(CourseError, match=r"course\.weave 06"):
        book.chapter(lesson_sources(["06"])[0])


def test_pages_that_are_gone_are_removed_and_unchanged_ones_left_alone(tmp_path):
    book.assemble(tmp_path)
    index, old = tmp_path / "index.md", tmp_path / "pages" / "old.md"
    before = index.stat().st_mtime_ns
    old.write_text("gone")
    book.assemble(tmp_path)
    assert not old.exists()
    assert index.stat().st_mtime_ns == before


def test_only_html_and_pages_are_understood(capsys):
    assert book.main(["publish"]) == 2
    assert "python -m book.build" in capsys.readouterr().out


def test_without_a_browser_nothing_is_printed_and_it_says_so(capsys):
    assert book.print_pages(None) == 1
    assert "any browser" in capsys.readouterr().err


@pytest.mark.slow
def test_sphinx_builds_it_without_a_warning_and_without_a_foreign_address(tmp_path):
    source, html = tmp_path / "source", tmp_path / "html"
    book.assemble(source)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", str(book.BOOK)]
    done = subprocess.run([*command, str(source), str(html)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pattern = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?:https?:)?//")
    for page in html.rglob("*.html"):
        assert not pattern.search(page.read_text(encoding="utf-8")), page.name

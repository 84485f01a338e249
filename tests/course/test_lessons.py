"""All lessons: their notebooks are current, they redefine nothing, every row and exercise they name exists."""

import re

import pytest

from minivllm.course.directives import expand, to_markdown
from minivllm.course.lint_lessons import defined_names, engine_names, lint, redefined
from minivllm.course.manifest import ROOT, CourseError, load_manifest
from minivllm.course.plot import Plot, axes
from minivllm.course.questions import load_bank
from minivllm.course.weave import is_current, lesson_sources, notebook_of, unmoved, weave

SOURCES = lesson_sources()
each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def test_the_lint_finds_nothing():
    assert lint() == []


@each_lesson
def test_the_notebook_has_the_cells_of_its_source(source):
    assert is_current(source), "run: python -m minivllm.course.weave"


@each_lesson
def test_every_exercise_of_a_chapter_stands_in_it(source):
    text = source.read_text()
    for exercise in load_manifest().values():
        if exercise.chapter == int(source.stem[:2]):
            assert f"{{exercise}} {exercise.id}" in text


@each_lesson
def test_every_row_of_a_chapter_is_asked_and_followed_up(source):
    text = source.read_text()
    for row in load_bank().of_chapter(int(source.stem[:2])):
        assert f"{{question}} {row.id}" in text
        assert f"{{followups}} {row.id}" in text


@pytest.mark.slow
@pytest.mark.model
@each_lesson
def test_weaving_again_gives_the_committed_notebook(source):
    assert unmoved(weave(source)) == unmoved(notebook_of(source).read_text(encoding="utf-8"))


# the lint itself


def test_engine_names_are_refused_unless_marked_naive_or_solved():
    names = engine_names()
    assert "longest_hit" in names
    assert redefined("def longest_hit(): ...", names)
    assert not redefined("def naive_longest_hit(): ...", names)
    assert not redefined("%%solve kv-02\ndef longest_hit(): ...", names)
    assert defined_names("%matplotlib inline\nclass A:\n    def f(self): ...") == ["A", "f"]


# directives


def test_our_directives_are_filled_from_bank_and_manifest():
    question = expand(":::{question} A18\n:::\n")
    assert load_bank().question("A18").question in question
    assert "{dropdown} An answer in 90 seconds" in question
    exercise = expand(":::{exercise} kv-02\n:::\n")
    stub = (ROOT / "exercises/kv_02_longest_hit.py").read_text()
    commands = re.findall(r"^(?:Grade|Run) it: +(python -m \S+)(?: kv-02.*|( .*))$", stub, re.M)
    assert len(commands) == 2
    assert all(f"{program}{rest}" in exercise for program, rest in commands)


def test_a_row_or_exercise_that_does_not_exist_is_refused():
    for text in (":::{question} Z9\n:::\n", ":::{exercise} kv-99\n:::\n"):
        with pytest.raises(CourseError, match=r"kv-99|Z9"):
            expand(text)


def test_jupyter_gets_no_directive_and_no_role():
    text = "(label)=\n:::{dropdown} More\n:class: x\n\n```python\n1\n```\n:::\n\nsee {doc}`03_paged_kv` and {term}`KV head`.\n"
    plain = to_markdown(text)
    assert plain.startswith("<details><summary>More</summary>")
    assert "```python" in plain
    assert "[03_paged_kv](03_paged_kv.ipynb) and KV head." in plain
    assert not re.search(r"\{\w+\}|:::", plain)


def test_a_directive_that_jupyter_cannot_show_is_refused():
    with pytest.raises(CourseError, match="card"):
        to_markdown(":::{card} x\ny\n:::\n")


def test_a_plots_legend_has_no_white_frame_that_would_hide_its_text_on_dark_pages():
    ax = axes("x", "y")
    ax.plot([0, 1], label="line")
    ax.legend()
    svg = Plot(ax, "a line")._repr_html_()
    assert "line" in svg
    assert "#ffffff" not in svg

"""Weaving: a source in MyST becomes an executed notebook, the same bytes every time."""

import nbformat
import pytest

from minivllm.course import weave as weave_module
from minivllm.course.weave import WeaveError, build, dump, first_difference, read_cells, settle, unmoved, weave

SOURCE = """# Title

:::{note} Mind
the gap
:::

```{code-cell}
print("a")
print("b")
6 * 7
```
between
+++
two cells

```{code-cell}
:tags: [volatile, hide-input]
import time

time.perf_counter()
```
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "07_demo.md"
    path.write_text(SOURCE)
    return path


def test_cells_alternate_and_plus_signs_split_prose(source):
    cells = read_cells(source)
    assert [(c.id, c.kind) for c in cells] == [
        ("07-00", "markdown"),
        ("07-01", "code"),
        ("07-02", "markdown"),
        ("07-03", "markdown"),
        ("07-04", "code"),
    ]
    assert cells[-1].tags == ("volatile", "hide-input")
    assert cells[-1].source.startswith("import time")


@pytest.mark.parametrize(
    ("text", "problem"),
    [("```{code-cell}\n1", "no closing fence"), ("```{code-cell}\n```{code-cell}\n```", "inside another")],
)
def test_a_fence_that_does_not_match_is_an_error_with_its_file(tmp_path, text, problem):
    path = tmp_path / "08_bad.md"
    path.write_text(text)
    with pytest.raises(WeaveError, match=rf"08_bad.md.*{problem}"):
        read_cells(path)


@pytest.mark.slow
def test_weaving_twice_gives_the_same_bytes_and_leaves_out_what_varies(source, monkeypatch, tmp_path):
    monkeypatch.setattr(weave_module, "LESSONS", tmp_path)
    text = weave(source)
    assert text == weave(source)
    notebook = nbformat.reads(text, as_version=4)
    first, last = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.outputs[0].text == "a\nb\n"
    assert first.outputs[1].data["text/plain"] == "42"
    assert last.outputs[0].text == weave_module.VOLATILE_NOTE
    assert "> **Mind**" in notebook.cells[0].source


@pytest.mark.slow
def test_a_failing_cell_fails_the_weaving_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(weave_module, "LESSONS", tmp_path)
    path = tmp_path / "09_fails.md"
    path.write_text("```{code-cell}\nassert 1 == 2, 'claims must hold'\n```\n")
    with pytest.raises(WeaveError, match="claims must hold"):
        weave(path)


def test_an_expected_error_keeps_its_message_without_a_traceback(source):
    notebook = build(read_cells(source), str)
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=["File /tmp/x.py", "..."])
    notebook.cells[1].outputs = [error, nbformat.v4.new_output("stream", name="stderr", text="warning")]
    settle(notebook)
    assert [o.traceback for o in notebook.cells[1].outputs] == [["ValueError: no"]]
    assert "/tmp/" not in dump(notebook)


def test_the_first_difference_is_named():
    assert "b" in first_difference("a\nb\n", "a\nc\n")


def test_shown_code_may_move_to_another_line_but_not_change():
    assert unmoved('"# minivllm/kv/pool.py, line 66"') == unmoved('"# minivllm/kv/pool.py, line 68"')
    assert unmoved('"# minivllm/kv/pool.py, line 66"') != unmoved('"# minivllm/kv/table.py, line 66"')
    assert unmoved("line 66 of the log") != unmoved("line 68 of the log")

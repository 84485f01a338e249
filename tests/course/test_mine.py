"""`run_mine`: the model answers through the reader's file, in another process, and the drawing is of that run."""

import pytest

from minivllm.course import mine
from minivllm.course.manifest import ROOT, CourseError, load_manifest
from minivllm.course.mine import MyRun, run_mine

FILE = load_manifest()["kv-02"].file_name
PROMPT = "The quick brown fox jumps over the lazy dog and runs away from the big bad wolf again and again."


@pytest.fixture
def reader(monkeypatch, tmp_path):
    """A course folder whose only exercise file the test writes."""
    (tmp_path / "exercises").mkdir()
    monkeypatch.setattr(mine, "ROOT", tmp_path)
    return tmp_path / "exercises" / FILE


def never_hits() -> str:
    """The engine's own answer, but looking up finds nothing."""
    text = (ROOT / "solutions" / FILE).read_text(encoding="utf-8")
    return text[: text.index("    hits: list[Block] = []")] + "    return []\n"


@pytest.mark.slow
@pytest.mark.model
def test_the_readers_code_decides_and_is_drawn(reader):
    reader.write_text(never_hits())
    run = run_mine("kv-02", [PROMPT, PROMPT], max_tokens=2)
    assert run.whose == "This ran through your kv-02."
    assert [cached for _, cached in run.answers] == [0, 0]
    assert 'class="film' in run.drawing


@pytest.mark.slow
def test_code_that_fails_is_an_error_with_its_last_words(reader):
    reader.write_text(never_hits().replace("    return []\n", "    return [][0]\n") + "\n1 / 0\n")
    with pytest.raises(CourseError, match="ZeroDivisionError"):
        run_mine("kv-02", [PROMPT], max_tokens=2)


@pytest.mark.parametrize("text", [None, 'def f():\n    raise NotImplementedError("kv-02: f")\n'])
def test_an_exercise_that_is_not_written_yet_is_left_to_the_engine(reader, text):
    if text is not None:
        reader.write_text(text)
    files, whose = mine._files(["kv-02"])
    assert files == []
    assert "the engine's own kv-02 (not written yet)" in whose


def test_a_run_can_be_read_in_a_terminal_and_in_a_page():
    run = MyRun("Yours.", [("<b>", 16)], "<svg/>", "tables")
    assert repr(run) == "Yours.\n  '<b>' (16 tokens from the cache)\ntables"
    assert "&lt;b&gt;" in run._repr_html_()

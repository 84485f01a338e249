"""The size table counts what a reader must read, and the ceilings hold."""

from pathlib import Path

from minivllm.course import size

SOURCE = '''"""Module
docstring."""
# a comment

X = """text
that counts"""


def f(a,
      b):
    """Docstring."""
    return a  # code


class C:
    """Docstring."""

    def g(self): return "no docstring"
'''


def test_blank_lines_comments_and_docstrings_are_not_code():
    assert size.code_lines(SOURCE) == {5, 6, 9, 10, 12, 15, 18}


def test_function_lines_include_the_signature_and_leave_out_the_docstring(tmp_path: Path):
    (tmp_path / "m.py").write_text(SOURCE)
    assert size.measure(tmp_path / "m.py", tmp_path).functions == {"m.py:9 f": 3, "m.py:18 g": 1}


def test_percentile_is_the_smallest_value_that_covers_the_share():
    assert [size.percentile([3, 1, 2, 4], share) for share in (0, 0.25, 0.26, 0.9, 1)] == [1, 1, 2, 4, 4]
    assert size.percentile([], 0.9) == 0


def test_a_file_belongs_to_its_top_folder_or_to_itself(tmp_path: Path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "pool.py").write_text("x = 1\n")
    (tmp_path / "llm.py").write_text("x = 1\n")
    assert [f.package for f in size.measure_all(tmp_path)] == ["kv", "llm"]


def test_every_broken_ceiling_is_named():
    big = size.FileSize(Path("kv/pool.py"), size.MAX_LINES + 1, {"kv/pool.py:1 f": size.MAX_FUNCTION_LINES + 1})
    course = size.FileSize(Path("course/cut.py"), size.MAX_COURSE_LINES + 1, {})
    broken = " ".join(size.over_limits([big, course]))
    for what in (
        "engine proper",
        "minivllm without course",
        "course has",
        "median",
        "90th",
        "file kv/pool.py",
        "function kv/pool.py:1 f",
    ):
        assert what in broken


def test_minivllm_stays_small_enough_to_read():
    assert size.over_limits(size.measure_all()) == []

"""Stubs keep signature and docstring byte for byte and nothing of the body; a student's file is never overwritten."""

import ast
import textwrap
from pathlib import Path

import pytest

from minivllm.course import cut
from minivllm.course.manifest import ROOT, CourseError, Exercise, load_manifest

ENGINE = '''
"""An engine module."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass as record

LIMIT = 3


def _private(x):
    return x


@functools.lru_cache
def long(
    x: int,  # a comment in the signature
    y: int = LIMIT,
) -> float:
    """What it does.

        An indented line.
    """
    # a comment that tells the answer
    return math.sqrt(_private(x))


def short(x): return x


class Thing:
    """A class."""

    size: int = 3

    def __init__(self, pool: int) -> None:
        self.pool = pool
        self._hidden = 0

    @property
    def first(self) -> int:
        """The first."""
        return self._help()

    # a comment that tells the answer
    def _help(self) -> int:
        return 1

    async def later(self) -> Iterator[int]:
        # a comment that tells the answer
        yield 1
'''


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A root with one engine module and one exercise."""
    (tmp_path / "engine.py").write_text(ENGINE.lstrip())
    (tmp_path / "exercises").mkdir()
    return tmp_path


def manifest(root: Path, *holes: str) -> Exercise:
    quoted = ", ".join(f'"engine:{hole}"' for hole in holes)
    text = f"""
    [[exercise]]
    id = "xx-01"
    name = "thing"
    title = "A thing"
    chapter = 1
    row = "A1"
    holes = [{quoted}]
    minutes = 5
    difficulty = 1
    [[exercise.part]]
    name = "it works"
    points = 3
    """
    (root / "exercises" / "manifest.toml").write_text(textwrap.dedent(text))
    return load_manifest(root)["xx-01"]


class TestStub:
    def test_decorators_signature_and_docstring_stay_and_the_body_goes(self, course):
        stub, _ = cut.cut(manifest(course, "long"), course)
        source = ENGINE.lstrip()
        kept = source[source.index("@functools.lru_cache") : source.index("    # a comment that tells")]
        assert f'@solves("engine:long")\n{kept}    raise NotImplementedError("xx-01: long")\n' in stub

    def test_nothing_of_the_body_is_left(self, course):
        stub, solution = cut.cut(manifest(course, "long", "short", "Thing"), course)
        for leak in ("tells the answer", "_private", "_help", "_hidden", "return"):
            assert leak not in stub, leak
        assert "return math.sqrt(_private(x))" in solution

    def test_a_body_on_the_line_of_the_signature(self, course):
        stub, _ = cut.cut(manifest(course, "short"), course)
        assert 'def short(x):\n    raise NotImplementedError("xx-01: short")' in stub

    def test_a_whole_class_keeps_its_public_face(self, course):
        stub, _ = cut.cut(manifest(course, "Thing"), course)
        thing = next(node for node in ast.parse(stub).body if isinstance(node, ast.ClassDef))
        assert [getattr(child, "name", "") for child in thing.body] == ["", "", "__init__", "first", "later"]
        assert stub.count("raise NotImplementedError(") == 3

    def test_a_method_comes_in_its_class_with_a_list_of_the_rest(self, course):
        stub, _ = cut.cut(manifest(course, "Thing.first"), course)
        assert 'class Thing:\n    """A class."""\n' in stub
        assert "It has\n    # pool; later()." in stub or "It has pool; later()." in stub.replace("\n    # ", " ")

    def test_imports_are_those_that_the_holes_use(self, course):
        _, solution = cut.cut(manifest(course, "long"), course)
        assert "import functools\nimport math\n" in solution
        assert "from engine import LIMIT, _private" in solution
        assert "Iterator" not in solution

    def test_a_hole_that_is_not_there_is_named(self, course):
        with pytest.raises(CourseError, match="the engine has no engine:gone"):
            cut.cut(manifest(course, "gone"), course)


class TestFiles:
    def test_what_was_written_is_current(self, course):
        manifest(course, "long")
        assert [line.split(": ")[1] for line in cut.write(course)] == ["written", "written"]
        assert cut.check(course) == []
        assert cut.write(course) == []

    def test_an_untouched_stub_follows_the_engine(self, course):
        manifest(course, "short")
        cut.write(course)
        engine = course / "engine.py"
        engine.write_text(engine.read_text().replace("def short(x)", "def short(x, y)"))
        assert cut.check(course) == ["exercises/xx_01_thing.py: out of date", "solutions/xx_01_thing.py: out of date"]
        cut.write(course)
        assert "def short(x, y)" in (course / "exercises" / "xx_01_thing.py").read_text()

    def test_an_edited_one_is_kept(self, course):
        manifest(course, "short")
        cut.write(course)
        stub = course / "exercises" / "xx_01_thing.py"
        stub.write_text(mine := stub.read_text().replace("raise NotImplementedError", "return x  #"))
        assert cut.write(course) == []
        assert stub.read_text() == mine
        assert cut.check(course) == ["exercises/xx_01_thing.py: edited"]

    def test_and_its_owner_told_when_the_contract_changes(self, course):
        manifest(course, "short")
        cut.write(course)
        stub = course / "exercises" / "xx_01_thing.py"
        stub.write_text(mine := stub.read_text() + "# mine\n")
        engine = course / "engine.py"
        engine.write_text(engine.read_text().replace("def short(x)", "def short(x, y)"))
        assert "yours, kept; but the contract has changed" in cut.write(course)[0]
        assert stub.read_text() == mine

    def test_unless_forced(self, course):
        manifest(course, "short")
        cut.write(course)
        stub = course / "exercises" / "xx_01_thing.py"
        stub.write_text(stub.read_text() + "# mine\n")
        cut.write(course, force=True)
        assert "# mine" not in stub.read_text()

    def test_a_stray_file_is_noticed(self, course):
        manifest(course, "short")
        cut.write(course)
        (course / "solutions" / "old.py").write_text("")
        assert cut.check(course) == ["solutions/old.py: no exercise of the manifest"]

    def test_the_solution_tells_why(self, course):
        manifest(course, "short")
        (course / "solutions" / "notes").mkdir(parents=True)
        (course / "solutions" / "notes" / "xx_01.md").write_text("Because it is short.\n")
        cut.write(course)
        assert "Because it is short." in (course / "solutions" / "xx_01_thing.py").read_text()


@pytest.mark.parametrize("exercise", load_manifest().values(), ids=lambda e: e.id)
def test_solutions_of_this_course_are_what_the_engine_gives(exercise):
    assert (ROOT / "solutions" / exercise.file_name).read_text() == cut.cut(exercise)[1], (
        "run: python -m minivllm.course.cut"
    )

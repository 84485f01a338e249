"""The grader notes what passed; a lesson opens the body of exactly that file."""

from pathlib import Path

import pytest

from minivllm.course.manifest import Exercise, Hole, Part
from minivllm.course.progress import has_passed, note_passed
from minivllm.course.records import End, PartRecord, Result, Status

EXERCISE = Exercise(
    "kv-09", "free", "t", 3, "B1", (Hole("minivllm.kv.block_pool", "BlockPool.free"),), 5, 1, (Part("p", 1),)
)


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises" / EXERCISE.file_name).write_text("def free(): ...\n")
    return tmp_path


def graded(status: Status) -> Result:
    record = PartRecord(EXERCISE.id, "p", "test_p", status)
    return Result.assemble(EXERCISE, "exercises", [record], End.FINISHED)


def test_a_file_with_full_marks_has_passed_until_it_changes(root):
    assert not has_passed(EXERCISE, root)
    note_passed([graded(Status.FAILED)], root)
    assert not has_passed(EXERCISE, root)
    note_passed([graded(Status.PASSED)], root)
    assert has_passed(EXERCISE, root)
    (root / "exercises" / EXERCISE.file_name).write_text("changed\n")
    assert not has_passed(EXERCISE, root)


def test_a_broken_record_is_no_record(root):
    (root / ".cache").mkdir()
    (root / ".cache" / "passed.json").write_text("not json")
    assert not has_passed(EXERCISE, root)


def test_a_missing_file_has_not_passed(root):
    (root / "exercises" / EXERCISE.file_name).unlink()
    assert not has_passed(EXERCISE, root)

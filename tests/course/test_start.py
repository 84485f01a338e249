"""An exercise against the clock, with a clock that the test moves."""

from pathlib import Path

import pytest

from minivllm.course.grade import main
from minivllm.course.manifest import ROOT, CourseError, load_manifest
from minivllm.course.records import End, PartRecord, Result, Status
from minivllm.course.start import Desk, blank_file, clock_face, sit

EXERCISE = load_manifest()["kv-01"]


class Session:
    """A desk whose time passes only by waiting; Enter is pressed at the given seconds."""

    def __init__(self, presses: tuple[float, ...] = (), right_from: float = 1e9) -> None:
        self.now, self.presses, self.right_from = 0.0, list(presses), right_from
        self.told: list[str] = []
        self.graded: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        if self.presses and self.now >= self.presses[0]:
            self.presses.pop(0)
            return True
        return False

    def grade(self, exercise, path) -> Result:
        self.graded.append(self.now)
        status = Status.PASSED if self.now >= self.right_from else Status.FAILED
        records = [PartRecord(exercise.id, part.name, part.name, status) for part in exercise.parts]
        return Result.assemble(exercise, str(path), records, End.FINISHED)

    def sit(self, minutes: float) -> Result:
        return sit(EXERCISE, Path("x.py"), minutes, Desk(lambda: self.now, self.wait, self.told.append, self.grade))


def test_it_is_graded_when_time_is_up():
    session = Session()
    session.sit(25)
    assert session.graded == [1500]


def test_the_time_left_is_shown_from_the_start_to_the_end():
    session = Session()
    session.sit(1)
    assert session.told[0].startswith("1:00 left")
    assert session.told[-2].startswith("0:01 left")


def test_on_demand_it_is_graded_early_and_full_marks_end_it():
    session = Session(presses=(60,), right_from=50)
    assert session.sit(25).full
    assert session.graded == [60]


def test_short_of_full_marks_the_time_goes_on():
    session = Session(presses=(60, 120), right_from=100)
    assert session.sit(25).full
    assert session.graded == [60, 120]


@pytest.mark.parametrize(("seconds", "face"), [(1500, "25:00"), (59.2, "1:00"), (0.5, "0:01")])
def test_minutes_and_seconds_round_up(seconds, face):
    assert clock_face(seconds) == face


@pytest.fixture
def root(tmp_path: Path) -> Path:
    stubs = tmp_path / "exercises" / "stubs"
    stubs.mkdir(parents=True)
    (stubs / EXERCISE.file_name).write_text((ROOT / "exercises" / EXERCISE.file_name).read_text())
    return tmp_path


def test_the_blank_file_has_signature_and_contract_and_not_what_is_graded(root: Path):
    text = blank_file(EXERCISE, root).read_text()
    assert "All or nothing: raises `OutOfBlocks" in text
    assert '@solves("minivllm.kv.block_pool:BlockPool.free")' in text
    assert not [part.name for part in EXERCISE.parts if part.name in text]
    assert "--hint" not in text


def test_a_blank_file_that_is_there_is_kept(root: Path):
    blank_file(EXERCISE, root)
    with pytest.raises(CourseError, match="is there already"):
        blank_file(EXERCISE, root)


def test_blank_without_start_is_an_error_not_an_ordinary_grading(capsys):
    assert main(["kv-01", "--blank"]) == 2
    assert "--blank goes with --start" in capsys.readouterr().err

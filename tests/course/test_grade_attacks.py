"""Whatever a student's file does costs its own exercise, awards nothing and leaves nothing behind. Also as root."""

import pickle
import subprocess
import sys

import pytest

from minivllm.course.manifest import ROOT, load_manifest
from minivllm.course.records import End, Result, Status

POINTS = load_manifest()["kv-02"].points
WITHOUT_LOOKUP = POINTS - 4 - 3 - 3
"""What an answer earns whose `longest_hit` is never right."""


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Result], list[str]]:
    """(results of all attacks, what still ran afterwards), graded together by one grader."""
    out = tmp_path_factory.mktemp("attacks") / "results"
    subprocess.run([sys.executable, "-m", "tests.course.attacks", str(out)], cwd=ROOT, check=True, timeout=600)
    return pickle.loads(out.read_bytes())


@pytest.fixture(scope="module")
def results(graded) -> dict[str, Result]:
    return graded[0]


@pytest.mark.parametrize("name", ["right first", "right last"])
def test_the_others_do_not_notice(results, name):
    assert (results[name].end, results[name].points) == (End.FINISHED, POINTS)


def test_nothing_is_left_running(graded):
    assert graded[1] == []


@pytest.mark.parametrize(
    "name",
    [
        "endless loop",
        "sys.exit",
        "pytest.skip",
        "claim on every descriptor",
        "read solutions",
        "30 GiB",
        "forged result file",
    ],
)
def test_what_fails_within_a_test_costs_the_parts_that_meet_it(results, name):
    assert results[name].points == WITHOUT_LOOKUP


@pytest.mark.parametrize(
    "name", ["fork loop", "fork loop that leaves its session", "daemon", "child that goes on testing"]
)
def test_what_disturbs_the_run_earns_no_part_that_meets_it(results, name):
    assert results[name].points <= WITHOUT_LOOKUP


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("loop that swallows", End.OUT_OF_TIME),
        ("loop in C", End.OUT_OF_TIME),
        ("prints without end", End.OUT_OF_TIME),
        ("much memory in many processes", End.OUT_OF_MEMORY),
        ("crash", End.EXITED),
        ("os._exit(0)", End.EXITED),
        ("os._exit(0) at import", End.EXITED),
        ("sys.exit at import", End.EXITED),
        ("pytest.exit", End.EXITED),
        ("error at import", End.BROKEN),
        ("syntax error", End.REFUSED),
        ("leave a hole out", End.REFUSED),
        ("import the hole", End.REFUSED),
        ("hole by module alias", End.REFUSED),
        ("hole by from-import of the module", End.REFUSED),
        ("import solutions", End.REFUSED),
        ("import the tests", End.REFUSED),
        ("import the grader", End.REFUSED),
        ("patch a test's run", End.TAMPERED),
        ("patch the code of a method", End.TAMPERED),
        ("patch hypothesis.given", End.TAMPERED),
        ("patch hypothesis inside", End.TAMPERED),
        ("patch pytest.raises", End.TAMPERED),
        ("patch builtins", End.TAMPERED),
    ],
)
def test_what_does_not_finish_awards_nothing_and_is_called_by_its_name(results, name, end):
    assert (results[name].end, results[name].points) == (end, 0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crash", "SIGSEGV"),
        ("import the hole", "the engine's own longest_hit, which is to be written here"),
        ("import solutions", "imports solutions, which holds answers"),
        ("leave a hole out", "has no @solves for minivllm.kv.prefix:longest_hit"),
        ("error at import", "ZeroDivisionError"),
        ("syntax error", "answer_36.py:1"),
        ("patch hypothesis inside", "run_engine"),
    ],
)
def test_the_reason_is_told(results, name, reason):
    assert reason in results[name].reason


def test_an_endless_loop_is_shown_with_its_line(results):
    part = results["endless loop"].parts[3]
    assert part.status is Status.TIMEOUT
    assert "answer_1.py:" in part.worst.why


def test_memory_beyond_the_limit_is_an_error_of_the_student(results):
    assert "MemoryError" in results["30 GiB"].parts[3].worst.why


def test_solutions_are_closed(results):
    assert "solutions are closed" in results["read solutions"].parts[3].worst.why


def test_another_process_finds_the_students_engine_too(results):
    assert "answer_" in results["engine in another process"].parts[3].worst.why


def test_output_is_cut(results):
    assert len(results["prints without end"].output) <= 1 << 14


def test_unusual_code_is_shown_to_the_lecturer(results):
    assert any("ctypes" in flag for flag in results["crash"].flags)
    assert any("exec()" in flag for flag in results["read solutions"].flags)

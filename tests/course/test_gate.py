"""The gate finds graders that let wrong answers pass, refuse right ones, or test nothing."""

from pathlib import Path

import pytest

from minivllm.course.gate import Cache, Case, Verdict, assess, table
from minivllm.course.grading import Task
from minivllm.course.manifest import ROOT, load_manifest
from minivllm.course.records import End, Status

EXERCISE = load_manifest()["kv-02"]
PARTS = [part.name for part in EXERCISE.parts]
MUTANTS = ROOT / "tests/exercises/mutants/kv_02"


def verdict(failed: list[int] = (), status: Status = Status.FAILED, **changes) -> Verdict:
    """All parts passed but those with these numbers."""
    statuses = {name: status if i in failed else Status.PASSED for i, name in enumerate(PARTS)}
    values = {"end": End.FINISHED, "reason": "", "statuses": statuses, "whys": {}, "errors": [], "seconds": 1.0}
    return Verdict(**values | changes)


def problems(**verdicts: Verdict) -> list[str]:
    """What the gate says of an exercise that is sound but for these verdicts."""
    sound = {
        "engine": verdict(),
        "solution": verdict(),
        "stub": verdict(range(6), Status.NOT_STARTED),
        "mutant": verdict([0, 1, 2]),
        "mutant2": verdict([3, 4, 5]),
        "rewrite": verdict(),
        "rewrite2": verdict(),
    }
    chosen = sound | verdicts
    impls = {"mutant": str(MUTANTS / "no_parent.py"), "mutant2": str(MUTANTS / "full_hit.py")}
    cases = [Case(EXERCISE, kind.rstrip("2"), Task(EXERCISE, impls.get(kind, kind))) for kind in chosen]
    return assess(EXERCISE, cases, list(chosen.values()), ROOT).problems


def test_a_sound_exercise_has_no_problem():
    assert problems() == []


@pytest.mark.parametrize("kind", ["engine", "solution", "rewrite"])
def test_right_answers_must_get_full_marks(kind):
    assert problems(**{kind: verdict([2])})[0].startswith(f"{kind} {kind} must get full marks, but fails {PARTS[2]!r}")


def test_a_stub_must_fail_every_part_as_not_started():
    assert problems(stub=verdict([0, 1, 2, 3, 4], Status.NOT_STARTED)) == [
        f"stub: part {PARTS[5]!r} is passed, not not started"
    ]
    assert len(problems(stub=verdict(range(6), Status.FAILED))) == 6


def test_a_mutant_must_fail_something():
    assert "mutant no_parent gets full marks" in problems(mutant=verdict())


def test_every_part_must_fail_a_mutant():
    assert problems(mutant=verdict([1, 2])) == [f"part {PARTS[0]!r} fails no mutant"]


def test_a_mutant_that_does_not_even_run_is_none():
    assert problems(mutant=verdict([0, 1, 2], errors=["NameError"])) == ["mutant no_parent is badly written: NameError"]
    refused = verdict(end=End.REFUSED, reason="no @solves")
    assert "mutant no_parent was not graded: refused: no @solves" in problems(mutant=refused)


def test_nothing_may_be_skipped():
    assert "engine engine: a test was skipped" in problems(engine=verdict([1], Status.SKIPPED))


def test_two_other_right_answers_are_needed():
    assert problems(rewrite2=verdict([0]))[-1] == "has 1 right but different answers, needs 2"


def test_the_table_has_a_column_for_each_part():
    cases = [Case(EXERCISE, "mutant", Task(EXERCISE, str(MUTANTS / "no_parent.py")))]
    text = table(assess(EXERCISE, cases, [verdict([0, 5])], ROOT), markdown=True)
    assert text.splitlines()[-1].startswith("| Hashes the block alone")
    assert text.splitlines()[-1].endswith("| ✗ |  |  |  |  | ✗ |")


class TestCache:
    def case(self, root: Path) -> Case:
        (root / "answer.py").write_text("one")
        (root / "engine.py").write_text("one")
        return Case(EXERCISE, "mutant", Task(EXERCISE, str(root / "answer.py")))

    def test_a_verdict_is_kept_while_its_files_stay_the_same(self, tmp_path):
        case = self.case(tmp_path)
        cache = Cache(tmp_path / "gate.json", tmp_path)
        cache.put(case, verdict([1]), ["engine.py"])
        cache.save()
        assert Cache(tmp_path / "gate.json", tmp_path).get(case) == verdict([1])

    @pytest.mark.parametrize("changed", ["answer.py", "engine.py"])
    def test_and_forgotten_when_one_changes(self, tmp_path, changed):
        case = self.case(tmp_path)
        cache = Cache(tmp_path / "gate.json", tmp_path)
        cache.put(case, verdict([1]), ["engine.py"])
        cache.save()
        (tmp_path / changed).write_text("two")
        assert Cache(tmp_path / "gate.json", tmp_path).get(case) is None

    def test_a_run_that_broke_off_is_not_kept(self, tmp_path):
        cache = Cache(tmp_path / "gate.json", tmp_path)
        cache.put(case := self.case(tmp_path), verdict(end=End.OUT_OF_TIME), [])
        assert cache.get(case) is None

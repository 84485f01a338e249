"""What grading prints and writes, from the command line as a student or lecturer runs it."""

import base64
import csv
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minivllm.course.cut import cut
from minivllm.course.manifest import ROOT, load_manifest
from tests.course.attacks import RIGHT, lookup

SOLUTIONS = ROOT / "solutions"

EXERCISES = load_manifest()
TOO_LONG = lookup(
    "hits = []\nfor block_hash in hashes[: num_tokens // block_size]:\n    block = index.find(block_hash)\n"
    "    if block is None:\n        break\n    hits.append(block)\nreturn hits"
).text


def grade(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "minivllm.course.grade", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Answers to kv-02: right, and with a hit that is too long."""
    folder = tmp_path_factory.mktemp("answers", numbered=True)
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    (folder / "right.py").write_text(RIGHT)
    (folder / "too_long.py").write_text(TOO_LONG)
    return folder


@pytest.fixture(scope="module")
def card(folder) -> subprocess.CompletedProcess:
    files = ["--json", folder / "results.json", "--junit", folder / "junit.xml"]
    return grade("kv-02", "--impl", folder / "too_long.py", "--hint", *files)


class TestCard:
    def test_says_which_behaviour_is_missing_and_why(self, card):
        assert "✗  the last token is always left to compute" in card.stdout
        assert "and 16 are taken from the cache: too many, one must be left to compute" in " ".join(card.stdout.split())

    def test_gives_points_for_each_part(self, card):
        assert "18/25" in card.stdout

    def test_shows_the_smallest_example_that_fails(self, card):
        text = " ".join(card.stdout.replace("│", "").split())
        assert "smallest example that fails" in text
        assert "cached=[([0], '')]" in text, "the smallest: one block of one token, cached"

    def test_says_what_came_and_what_was_expected(self, card):
        text = " ".join(card.stdout.replace("│", "").split())
        assert "came: 1 expected: 0" in text

    def test_says_what_points_are_for(self, card):
        assert "A part earns its points when all its tests pass" in card.stdout

    def test_shows_as_many_hints_as_asked_for(self, card):
        assert "hint 1 of 3: Two blocks with the same tokens" in card.stdout
        assert "hint 2" not in card.stdout

    def test_exit_status_is_one_until_all_is_right(self, card, folder):
        assert card.returncode == 1
        assert grade("kv-02", "--impl", folder / "right.py").returncode == 0

    def test_an_unknown_exercise_is_no_request(self):
        answer = grade("kv-99")
        assert (answer.returncode, "there is no exercise 'kv-99'" in answer.stderr) == (2, True)

    def test_solutions_get_full_marks(self):
        answer = grade("--impl", "solutions")
        total = sum(exercise.points for exercise in EXERCISES.values())
        assert answer.returncode == 0
        assert f"{total}/{total}" in answer.stdout


def card_of(id: str, solution: str, old: str, new: str, folder: Path) -> str:
    """The card of a solution in which a piece of code is another one, as one line."""
    path = folder / "spoilt.py"
    text = (SOLUTIONS / solution).read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return " ".join(grade(id, "--impl", path).stdout.replace("│", "").split())


class TestFailures:
    def test_one_exception_in_all_parts_is_told_once(self, folder):
        text = card_of("kv-01", "kv_01_block_pool.py", "free_list.pop_head()", "free_list.pop()", folder)
        assert text.count("has no attribute 'pop'") == 1
        assert "the same in: all other parts" in text

    def test_an_exception_that_did_not_come_is_told_as_behaviour(self, folder):
        text = card_of("kv-01", "kv_01_block_pool.py", "self._check_references(ordered)", "pass", folder)
        assert "DID NOT RAISE" not in text
        assert "freeing a block that nobody holds must raise ValueError, but it went through" in text

    def test_another_exception_than_due_is_told_with_its_line(self, folder):
        raised = 'raise OutOfBlocks("the free list is empty")'
        text = card_of("kv-03", "kv_03_leaf_first.py", raised, "raise StopIteration", folder)
        assert "must raise OutOfBlocks, but your code raised StopIteration at `raise StopIteration`" in text

    def test_a_double_of_the_grader_has_the_name_that_the_contract_gives_it(self, folder):
        text = card_of("kv-03", "kv_03_leaf_first.py", "self._emit(EventKind.FREED, ", "self._emit(", folder)
        assert "raised TypeError: _emit() missing 1 required positional argument" in text


def test_what_is_not_written_yet_is_named(folder):
    path = folder / "half.py"
    stub = cut(EXERCISES["kv-01"])[0]
    path.write_text(stub.replace('raise NotImplementedError("kv-01: BlockPool.touch")', "pass"))
    text = grade("kv-01", "--impl", path).stdout
    assert "BlockPool.allocate is not written yet" in text
    assert "not started" in text


def test_one_method_written_is_a_start(folder):
    path = folder / "begun.py"
    body = "blocks = [self.free_list.pop_head() for _ in range(n)]\n        for b in blocks: b.ref_count = 1\n        return blocks"
    path.write_text(cut(EXERCISES["kv-01"])[0].replace('raise NotImplementedError("kv-01: BlockPool.allocate")', body))
    text = grade("kv-01", "--impl", path).stdout
    assert "BlockPool.free is not written yet" in text
    assert "not started" not in text


class TestFiles:
    def test_gradescope(self, card, folder):
        body = json.loads((folder / "results.json").read_text())
        assert body["score"] == sum(test["score"] for test in body["tests"]) == 18
        assert [test["max_score"] for test in body["tests"]] == [part.points for part in EXERCISES["kv-02"].parts]
        assert {test["status"] for test in body["tests"]} == {"passed", "failed"}

    def test_junit(self, card, folder):
        suite = ElementTree.parse(folder / "junit.xml").getroot()[0]
        assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("kv-02", "6", "2")

    def test_github_classroom(self, folder):
        body = json.loads(base64.b64decode(grade("kv-02", "--impl", folder / "right.py", "--classroom").stdout))
        assert (body["version"], body["status"], body["max_score"]) == (1, "pass", 25)


def test_a_class_is_one_line_a_student(folder):
    for name, text in {"ada": RIGHT, "bob": TOO_LONG, "eve": "from solutions import kv_02\n" + RIGHT}.items():
        (folder / "class" / name).mkdir(parents=True, exist_ok=True)
        (folder / "class" / name / "kv_02_longest_hit.py").write_text(text)
    (folder / "class" / "zoe").mkdir(exist_ok=True)
    answer = grade("kv-02", "--submissions", folder / "class", "--csv", folder / "grades.csv")
    rows = list(csv.DictReader((folder / "grades.csv").open()))
    assert answer.returncode == 0
    assert [(row["student"], row["kv-02"], row["of"]) for row in rows] == [
        ("ada", "25", "25"),
        ("bob", "18", "25"),
        ("eve", "0", "25"),
        ("zoe", "0", "25"),
    ]
    assert "imports solutions" in rows[2]["notes"]


def test_plain_pytest_grades_too(folder):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/exercises/test_kv_02.py",
        "-q",
        "--impl",
        str(folder / "too_long.py"),
    ]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 1
    assert "18/25" in answer.stdout


def test_graders_in_one_process_see_one_answer_each(folder):
    """kv-03's grader, run after kv-02's on a wrong kv-02, sees the engine's kv-02."""
    (folder / "both").mkdir(exist_ok=True)
    (folder / "both" / "kv_02_longest_hit.py").write_text(TOO_LONG)
    (folder / "both" / "kv_03_leaf_first.py").write_text((ROOT / "solutions" / "kv_03_leaf_first.py").read_text())
    graders = ["tests/exercises/test_kv_02.py", "tests/exercises/test_kv_03.py"]
    command = [sys.executable, "-m", "pytest", *graders, "-q", "--impl", str(folder / "both")]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert "18/25" in answer.stdout
    assert "25/25" in answer.stdout


def test_all_finished_exercises_run_in_one_engine():
    answer = grade("kv-01", "kv-02", "kv-03", "--impl", "solutions", "--mine")
    assert "one engine with your kv-01, kv-02, kv-03" in answer.stdout
    assert answer.returncode == 0

"""The question bank holds what it claims: numbers by formula, symbols that resolve, exercises that exist."""

import pytest

from minivllm.course.manifest import CourseError, load_manifest
from minivllm.course.quantities import Verdict, calculate, judge, read_quantities
from minivllm.course.questions import QuestionError, load_bank, validate

BANK = load_bank()
EXERCISES = set(load_manifest())


@pytest.mark.parametrize("question", BANK.questions, ids=lambda question: question.id)
def test_every_question_holds_what_it_claims(question):
    validate(question, EXERCISES)


def test_the_first_four_chapters_are_there_with_exercises_and_symbols():
    for row in ("A22", "A19", "B1", "A29", "A18", "A35"):
        question = BANK.question(row)
        assert question.exercises
        assert question.symbols


def test_every_row_of_the_syllabus_is_asked():
    syllabus = {f"A{i}" for i in range(1, 36)} | {f"B{i}" for i in range(1, 39)}
    assert {question.id for question in BANK.questions} == syllabus


def test_exercises_name_the_row_that_names_them():
    rows = {id: exercise.row for id, exercise in load_manifest().items()}
    for question in BANK.questions:
        assert all(rows[exercise] == question.id for exercise in question.exercises)


def test_questions_come_in_the_order_of_chapters():
    numbers = [question.chapter for question in BANK.questions]
    assert numbers == sorted(numbers)


def test_an_unknown_row_or_part_names_those_there_are():
    with pytest.raises(CourseError, match="A22"):
        BANK.question("A99")
    with pytest.raises(CourseError, match="kv"):
        BANK.of_part("gpu")


ROW = """
[[chapter]]
number = 1
part = "model"
title = "One"

[[row]]
id = "A1"
chapter = 1
title = "T"
question = "Q?"
answer = "A."
rubric = ["one"]
"""


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("title = \"T\"", "titel = \"T\""), "titel: is no field"),
        (("question = \"Q?\"\n", ""), "question: is missing"),
        (("rubric = [\"one\"]", "rubric = \"one\""), "rubric: must be a list"),
        (("chapter = 1", "chapter = \"1\""), "chapter: must be of type int"),
        (("chapter = 1", "chapter = 7"), "7 is not in the list"),
    ],
)  # fmt: skip
def test_a_bank_with_a_mistake_is_refused_naming_row_and_field(tmp_path, change, complaint):
    path = tmp_path / "questions.toml"
    path.write_text(ROW.replace(*change))
    with pytest.raises(QuestionError, match=complaint):
        load_bank(path)


def test_a_row_that_occurs_twice_is_refused(tmp_path):
    path = tmp_path / "questions.toml"
    path.write_text(ROW + ROW[ROW.index("[[row]]") :])
    with pytest.raises(QuestionError, match="twice"):
        load_bank(path)


# numbers and units


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("12.2 GiB of it", [(12.2 * 2**30, "bytes")]),
        ("6,249 blocks", [(6249, "block")]),
        ("34k tok/s", [(34_000, "tok/s")]),
        ("111 tokens per second", [(111, "tok/s")]),
        ("a 16-token block", [(16, "token")]),
        ("98 % or 65ms", [(0.98, ""), (0.065, "s")]),
        ("an H100 and FP8", []),
        ("5.9x", [(5.9, "")]),
        ("3.35 TB/s", [(3.35e12, "bytes/s")]),
        (".5 or 1e3", [(0.5, ""), (1000, "")]),
    ],
)
def test_numbers_are_read_with_their_units(text, values):
    assert [(q.value, q.measure) for q in read_quantities(text)] == [(pytest.approx(v), unit) for v, unit in values]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("12.2 GiB", Verdict.RIGHT),
        ("about 13.1 GB", Verdict.RIGHT),
        ("12,498 MiB", Verdict.RIGHT),
        ("12.2", Verdict.NO_UNIT),
        ("12.2 MiB", Verdict.OTHER_UNIT),
        ("9 GiB", Verdict.MISSING),
        ("a lot", Verdict.MISSING),
        ("first I thought 9 GiB, but it is 12.2 GiB", Verdict.RIGHT),
    ],
)
def test_an_answer_is_judged_by_the_best_number_it_holds(answer, verdict):
    assert judge(answer, 12.205, "GiB", tolerance=0.02) is verdict


def test_gb_for_gib_is_told_apart_when_the_tolerance_is_tight():
    assert judge("12.2 GB", 12.205, "GiB", tolerance=0.02) is Verdict.OTHER_UNIT


def test_a_percentage_may_be_given_as_a_share():
    assert judge("0.167 of it", 16.7, "%", tolerance=0.02) is Verdict.RIGHT


def test_formulas_know_the_calculators_and_refuse_the_rest():
    assert calculate("decode_tps(H100.bandwidth_bytes_per_s, 3.35e12)") == 1.0
    with pytest.raises(CourseError, match="open"):
        calculate("open('x')")

"""An interview with typed lines and a clock that the test moves: nothing waits, nothing is lost."""

import io

import pytest
from rich.console import Console

from minivllm.config import ConfigError
from minivllm.course import recall
from minivllm.course.interview import Desk, Interview, choose, interview, main
from minivllm.course.questions import Bank, Chapter, FollowUp, Number, Question, Wrong, load_bank
from minivllm.course.recall import DAY, Attempt, Card, RecallStore, data_dir, in_order, next_interval

SPEED = Number("Speed of it", "100 * 2", "200", "tok/s")
ROWS = tuple(
    Question(id, chapter, f"Title {id}", f"Why {id}?", "Because.", ("first", "second"), (SPEED,),
             (Wrong("no", "since"),), (FollowUp("and?", "seniority"), FollowUp("or?", "wisdom")))
    for id, chapter in (("A1", 1), ("A2", 2), ("A3", 2))
)  # fmt: skip
BANK = Bank((Chapter(1, "model", "One"), Chapter(2, "kv", "Two")), ROWS)


class Typist:
    """Types the lines given, a second each; at their end presses Ctrl-C."""

    def __init__(self, *lines):
        self.lines = list(lines)
        self.prompts = []
        self.now = 1000.0

    def read(self, prompt):
        self.prompts.append(prompt)
        self.now += 1
        if not self.lines:
            raise KeyboardInterrupt
        return self.lines.pop(0)

    def clock(self):
        return self.now


@pytest.fixture
def store(tmp_path):
    return RecallStore(tmp_path / "data" / "interview.sqlite3")


def hold(store, typist, questions=ROWS[:1], **options):
    console = Console(file=io.StringIO(), width=100)
    session = Interview(BANK, store, Desk(console, typist.read, typist.clock), **options)
    session.run(questions)
    return session, console.file.getvalue()


GOOD = ("200 tok/s of course", "", "y", "y", "")


def test_an_answer_with_the_number_and_all_points_scores_full_and_comes_back_tomorrow(store):
    session, text = hold(store, Typist(*GOOD))
    assert session.scored[0].attempt.score == 1.0
    assert store.cards()["A1"].due_at - session.scored[0].attempt.at == DAY
    assert "Nothing to reread" in text


def test_a_number_that_was_not_said_is_asked_for_once(store):
    typist = Typist("fast", "", "200 tok/s", "y", "y", "")
    session, _ = hold(store, typist)
    assert typist.prompts.count("Speed of it? ") == 1
    assert session.scored[0].attempt.score == 1.0


def test_a_number_with_the_wrong_unit_is_asked_for_again_with_the_reason(store):
    typist = Typist("200 ms", "", "", "y", "y", "")
    session, _ = hold(store, typist)
    assert "Speed of it? (right figure, wrong unit) " in typist.prompts
    assert session.scored[0].attempt.score == pytest.approx(2 / 3)


def test_points_count_half_and_nonsense_is_asked_again(store):
    session, _ = hold(store, Typist("200 tok/s", "", "maybe", "h", "n", ""))
    assert session.scored[0].attempt.score == pytest.approx(0.5)


def test_a_weak_row_ends_in_what_to_reread(store):
    _, text = hold(store, Typist("dunno", "", "", "n", "n", ""), questions=ROWS[1:2])
    assert "Reread" in text
    assert "chapter 2, Two" in text


def test_leaving_in_the_middle_keeps_what_was_scored(store):
    session, text = hold(store, Typist(*GOOD, "half an ans"), questions=ROWS)
    assert [done.question.id for done in session.scored] == ["A1"]
    assert set(store.cards()) == {"A1"}
    assert "Stopped. 1 scored and kept." in text


def test_the_typed_answer_and_its_time_are_kept(store):
    hold(store, Typist("200 tok/s", "and more", "", "y", "y", ""))
    attempt = store.attempts("A1")[0]
    assert attempt.answer == "200 tok/s\nand more"
    assert attempt.seconds == 3.0


def test_the_follow_up_changes_from_time_to_time(store):
    asked = [("and?" in text, "or?" in text) for _, text in (hold(store, Typist(*GOOD)) for _ in range(2))]
    assert asked == [(True, False), (False, True)]


def test_square_brackets_in_a_question_are_not_markup(store):
    odd = Question("A1", 1, "T", "What is x[b, h]?", "a[0]", ("q[B, H]",), (), (), ())
    _, text = hold(store, Typist("", "y"), questions=[odd])
    assert "What is x[b, h]?" in text
    assert "a[0]" in text


# which question when


def test_intervals_grow_with_success_and_fall_with_failure():
    assert [next_interval(days, 0.9) for days in (0, 1, 2.5, 50)] == [1, 2.5, 6.25, 60]
    assert next_interval(30, 0.6) == 1
    assert next_interval(30, 0.4) == 0


def test_overdue_rows_come_first_then_new_ones_then_those_not_due_yet():
    cards = {"late": Card("late", 10, 1), "later": Card("later", 20, 1), "soon": Card("soon", 99, 1)}
    assert in_order(["new1", "soon", "later", "new2", "late"], cards, now=50) == [
        "late",
        "later",
        "new1",
        "new2",
        "soon",
    ]


def test_a_store_remembers_over_restarts(store):
    store.record(Attempt("A1", 5.0, 0.9, 60, "text"))
    assert RecallStore(store.path).attempts("A1") == [Attempt("A1", 5.0, 0.9, 60, "text")]


def test_rows_are_chosen_by_name_by_part_or_by_what_is_due(store):
    def chosen(**how):
        return [question.id for question in choose(BANK, store, now=0, **how)]

    assert chosen(rows=["a3", "A1"]) == ["A3", "A1"]
    assert chosen(part="kv") == ["A2", "A3"]
    assert chosen(count=2) == ["A1", "A2"]
    store.record(Attempt("A1", -5.0, 0.0, 1))
    store.record(Attempt("A2", 0.0, 1.0, 1))
    assert chosen() == ["A1", "A3", "A2"]


@pytest.mark.parametrize(
    ("environment", "platform", "path"),
    [
        ({"MINIVLLM_DATA": "/x", "HOME": "/h"}, "linux", "/x"),
        ({"HOME": "/h"}, "linux", "/h/.local/share/minivllm"),
        ({"HOME": "/h", "XDG_DATA_HOME": "/d"}, "linux", "/d/minivllm"),
        ({"HOME": "/h"}, "darwin", "/h/Library/Application Support/minivllm"),
        ({"USERPROFILE": "/u", "LOCALAPPDATA": "/u/L"}, "win32", "/u/L/minivllm"),
    ],
)
def test_data_lives_where_the_platform_keeps_it(environment, platform, path):
    assert data_dir(environment, platform).as_posix() == path


def test_without_a_home_folder_the_variable_is_named_with_what_to_do(homeless):
    with pytest.raises(ConfigError, match=r"MINIVLLM_DATA=None: there is no home folder .* set it to a folder"):
        data_dir({}, "linux")


# the command


def test_the_command_runs_a_session_on_the_real_bank(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_DATA", str(tmp_path))
    question = load_bank().question("A22")
    lines = ["111 tok/s", "", *[""] * (len(question.numbers) - 1), *["y"] * len(question.rubric), ""]
    typist = Typist(*lines)
    console = Console(file=io.StringIO(), width=100)
    assert interview(rows="A22", desk=Desk(console, typist.read, typist.clock)) == 0
    assert set(recall.RecallStore(tmp_path / "interview.sqlite3").cards()) == {"A22"}


def test_an_unknown_row_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINIVLLM_DATA", str(tmp_path))
    assert main(["--rows", "Z9"]) == 2
    assert capsys.readouterr().err.startswith("error: row='Z9'")


def test_the_list_shows_every_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINIVLLM_DATA", str(tmp_path))
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(question.id in printed for question in load_bank().questions)

"""The interview in the terminal: asks a row, checks the numbers, lets you score yourself, remembers when to ask again.

`python -m minivllm interview`, or by itself: `python -m minivllm.course.interview --rows A22 --timed`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from minivllm.config import MinivllmError
from minivllm.course.manifest import ROOT
from minivllm.course.quantities import Verdict
from minivllm.course.questions import Bank, Number, Question, load_bank
from minivllm.course.recall import DAY, PASSED, Attempt, Card, RecallStore, data_dir, in_order

WORDS_PER_MINUTE = 140
"""How fast people explain something aloud."""
TIME_LIMIT_S = 300
"""With `--timed`: what takes 90 seconds to say takes about five minutes to type."""
CREDIT = {"y": 1.0, "h": 0.5, "n": 0.0}
STYLE = {Verdict.RIGHT: "green", Verdict.NO_UNIT: "green", Verdict.OTHER_UNIT: "yellow", Verdict.MISSING: "red"}


@dataclass(frozen=True, slots=True)
class Desk:
    """What an interview touches of the world. `read(prompt)` returns a line, or raises EOFError or KeyboardInterrupt to
    leave; `clock()` are seconds since the epoch."""

    console: Console
    read: Callable[[str], str]
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Scored:
    """One question that was answered and scored."""

    question: Question
    attempt: Attempt
    card: Card


class Interview:
    """Asks questions one after the other; each is on disk once it is scored."""

    def __init__(self, bank: Bank, store: RecallStore, desk: Desk, *, timed: bool = False) -> None:
        self.bank = bank
        self.store = store
        self.desk = desk
        self.timed = timed
        self.scored: list[Scored] = []

    def run(self, questions: Sequence[Question]) -> list[Scored]:
        """Ask all; leaving early (Ctrl-C, Ctrl-D) keeps what was scored. Ends with what to reread."""
        try:
            for position, question in enumerate(questions, 1):
                self.ask(question, f"{position} of {len(questions)}")
        except (KeyboardInterrupt, EOFError):
            self.desk.console.print(f"\n[yellow]Stopped. {len(self.scored)} scored and kept.[/]")
        self._report()
        return self.scored

    def ask(self, question: Question, position: str = "") -> Scored:
        """One question: answer, numbers, model answer, rubric, a follow-up; then it is scored and kept."""
        earlier = self.store.attempts(question.id)
        self._show_question(question, position, earlier)
        start = self.desk.clock()
        answer = self._read_answer()
        seconds = self.desk.clock() - start
        self._show_pace(answer, seconds)
        right = self._check_numbers(question, answer)
        self._show_model_answer(question)
        points = self._self_score(question)
        self._follow_up(question, len(earlier))
        score = (right + points) / (len(question.numbers) + len(question.rubric))
        attempt = Attempt(question.id, self.desk.clock(), score, seconds, answer)
        done = Scored(question, attempt, self.store.record(attempt))
        self.scored.append(done)
        when = _due_in(done.card, attempt.at)
        self.desk.console.print(f"\n[bold]{question.id}[/]: {score:.0%}, to be asked again {when}.\n")
        return done

    # the steps of one question

    def _show_question(self, question: Question, position: str, earlier: Sequence[Attempt]) -> None:
        chapter = self.bank.chapter(question.chapter)
        last = f", last time {earlier[-1].score:.0%}" if earlier else ""
        title = f"[bold]{question.id} {escape(question.title)}[/]"
        note = f"{position}, chapter {chapter.number}: {chapter.title}{last}".strip(", ")
        self.desk.console.print(
            Panel(escape(question.question), title=title, subtitle=note, border_style="cyan", padding=1)
        )
        limit = f" You have {TIME_LIMIT_S // 60} minutes." if self.timed else ""
        self.desk.console.print(f"[dim]Type your answer as you would say it; an empty line ends it.{limit}[/]")

    def _read_answer(self) -> str:
        lines: list[str] = []
        while line := self.desk.read("> " if not lines else "  ").strip():
            lines.append(line)
        return "\n".join(lines)

    def _show_pace(self, answer: str, seconds: float) -> None:
        words = len(answer.split())
        aloud = 60 * words / WORDS_PER_MINUTE
        style = "red" if self.timed and seconds > TIME_LIMIT_S else "dim"
        self.desk.console.print(f"[{style}]{words} words, about {aloud:.0f} s aloud; typed in {seconds:.0f} s.[/]")

    def _check_numbers(self, question: Question, answer: str) -> int:
        """How many of the numbers were given, in the answer or when asked for."""
        verdicts = [(number, self._verdict(number, answer)) for number in question.numbers]
        if verdicts:
            self.desk.console.print(_number_table(verdicts))
        return sum(verdict.counts for _, verdict in verdicts)

    def _verdict(self, number: Number, answer: str) -> Verdict:
        verdict = number.judge(answer)
        if verdict.counts:
            return verdict
        hint = f" ({verdict})" if verdict is Verdict.OTHER_UNIT else ""
        again = self.desk.read(f"{number.ask}?{hint} ").strip()
        return number.judge(again) if again else verdict

    def _show_model_answer(self, question: Question) -> None:
        console = self.desk.console
        console.print(Panel(escape(question.answer), title="An answer in 90 seconds", border_style="green", padding=1))
        if question.correction:
            console.print(Panel(escape(question.correction), title="Often said, but", border_style="yellow"))
        console.print("[bold]Wrong answers one hears[/]")
        for wrong in question.wrong:
            console.print(f"  [red]✗[/] {escape(wrong.answer)}\n    [dim]{escape(wrong.why)}[/]")

    def _self_score(self, question: Question) -> float:
        self.desk.console.print("\n[bold]Did you say it?[/] [dim]y yes, h half, n no[/]")
        return sum(self._credit(point) for point in question.rubric)

    def _credit(self, point: str) -> float:
        while True:
            given = self.desk.read(f"  {point} [y/h/n] ").strip().lower()[:1]
            if given in CREDIT:
                return CREDIT[given]
            self.desk.console.print("  [dim]y, h or n[/]")

    def _follow_up(self, question: Question, turn: int) -> None:
        if question.followups:
            asked = question.followups[turn % len(question.followups)]
            self.desk.console.print(f"\n[bold]And then:[/] {escape(asked.question)}")
            self._read_answer()
            self.desk.console.print(f"[bold]A senior answer includes:[/] {escape(asked.senior)}")

    # the end

    def _report(self) -> None:
        if not self.scored:
            return
        table = Table(title="This session", show_edge=False, pad_edge=False)
        for heading in ("row", "question", "score", "typed in", "again"):
            table.add_column(heading)
        for done in self.scored:
            style = "green" if done.attempt.score >= PASSED else "red"
            again = _due_in(done.card, done.attempt.at)
            table.add_row(done.question.id, escape(done.question.title), f"[{style}]{done.attempt.score:.0%}[/]",
                          f"{done.attempt.seconds:.0f} s", again)  # fmt: skip
        self.desk.console.print(table)
        self._show_reading([done.question for done in self.scored if done.attempt.score < PASSED])

    def _show_reading(self, weak: Sequence[Question]) -> None:
        if not weak:
            self.desk.console.print("[green]Nothing to reread.[/]")
            return
        self.desk.console.print("\n[bold]Reread[/]")
        for question in weak:
            chapter = self.bank.chapter(question.chapter)
            where = chapter.source.relative_to(ROOT) if chapter.source else "not written yet"
            self.desk.console.print(f"  {question.id}  chapter {chapter.number}, {chapter.title} ({where})")
            for label, names in (("exercises", question.exercises), ("code", question.symbols)):
                if names:
                    self.desk.console.print(f"       [dim]{label}: {', '.join(names)}[/]")


def _number_table(verdicts: Sequence[tuple[Number, Verdict]]) -> Table:
    table = Table(title="Numbers", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("you")
    for number, verdict in verdicts:
        value = f"{number.value:,.4g} {number.unit}" if number.value < 1000 else f"{number.value:,.0f} {number.unit}"
        table.add_row(escape(number.ask), value.strip(), f"[{STYLE[verdict]}]{verdict}[/]")
    return table


def _due_in(card: Card, now: float) -> str:
    days = (card.due_at - now) / DAY
    return "next time" if days < 0.5 else "tomorrow" if days < 1.5 else f"in {days:.0f} days"


# choosing questions and starting


def choose(
    bank: Bank, store: RecallStore, now: float, *, part: str = "", rows: Sequence[str] = (), count: int = 5
) -> list[Question]:
    """The questions of a session: the rows named, in that order; else up to `count` of a part or of all, what is due first.

    Raises `CourseError` for a row or a part that there is none of.
    """
    if rows:
        return [bank.question(row) for row in rows]
    pool = bank.of_part(part) if part else list(bank.questions)
    chosen = in_order([question.id for question in pool], store.cards(), now)
    return [bank.question(row) for row in chosen[:count]]


def list_rows(bank: Bank, cards: dict[str, Card], now: float) -> Table:
    """All rows with their chapters and when they are due."""
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("row", "part", "ch", "question", "due"):
        table.add_column(heading)
    for question in bank.questions:
        card = cards.get(question.id)
        due = "new" if card is None else "now" if card.due_at <= now else _due_in(card, now)
        chapter = bank.chapter(question.chapter)
        table.add_row(question.id, chapter.part, str(chapter.number), escape(question.title), due)
    return table


def interview(
    part: str = "",
    rows: str = "",
    *,
    timed: bool = False,
    count: int = 5,
    show: bool = False,
    desk: Desk | None = None,
) -> int:
    """Run a session in the terminal; returns the exit code. `rows` are separated by commas; `show` only lists the rows."""
    console = Console()
    desk = desk or Desk(console, lambda prompt: console.input(escape(prompt)), time.time)
    bank, store = load_bank(), RecallStore(data_dir() / "interview.sqlite3")
    if show:
        desk.console.print(list_rows(bank, store.cards(), desk.clock()))
        return 0
    named = [row.strip() for row in rows.split(",") if row.strip()]
    Interview(bank, store, desk, timed=timed).run(choose(bank, store, desk.clock(), part=part, rows=named, count=count))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m minivllm.course.interview`."""
    parser = argparse.ArgumentParser(
        prog="minivllm interview", description="Practise the course's interview questions."
    )
    parser.add_argument(
        "--part", default="", help="only this part of the book: model, kv, sched, quant, scale, serve, fleet"
    )
    parser.add_argument("--rows", default="", help="these rows, separated by commas: A22,B1")
    parser.add_argument("--count", type=int, default=5, help="questions a session (default 5)")
    parser.add_argument("--timed", action="store_true", help=f"{TIME_LIMIT_S // 60} minutes for each answer")
    parser.add_argument("--list", action="store_true", dest="show", help="list the rows and when they are due")
    given = parser.parse_args(arguments)
    try:
        return interview(given.part, given.rows, timed=given.timed, count=given.count, show=given.show)
    except MinivllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

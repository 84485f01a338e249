"""Spaced repetition: which question when, remembered in a SQLite file of the user's."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from minivllm.config import ConfigError

DAY = 86_400.0
GROWTH = 2.5
LONGEST_DAYS = 60.0
PASSED, SHAKY = 0.8, 0.5

_TABLES = """
CREATE TABLE IF NOT EXISTS attempt (row TEXT, at REAL, score REAL, seconds REAL, answer TEXT);
CREATE TABLE IF NOT EXISTS card (row TEXT PRIMARY KEY, due_at REAL, interval_days REAL);
"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One answered question: when (seconds since the epoch), how well (0 to 1), in how many seconds."""

    row: str
    at: float
    score: float
    seconds: float
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """When a row should be asked again (seconds since the epoch), and after which interval that is."""

    row: str
    due_at: float
    interval_days: float


def next_interval(previous_days: float, score: float) -> float:
    """Days until a row is asked again.

    Below 0.5 it stays due (0 days); below 0.8 it comes back tomorrow; from 0.8 on the interval grows from 1 day by 2.5 each time,
    up to 60 days.
    """
    if score < SHAKY:
        return 0.0
    if score < PASSED:
        return 1.0
    return min(LONGEST_DAYS, max(1.0, previous_days * GROWTH))


def in_order(rows: Iterable[str], cards: Mapping[str, Card], now: float) -> list[str]:
    """Rows in the order to ask: due ones, longest overdue first; then new ones as given; then the rest by due time."""

    def key(row: str) -> tuple[int, float]:
        card = cards.get(row)
        if card is None:
            return 1, 0.0
        return (0 if card.due_at <= now else 2), card.due_at

    return sorted(rows, key=key)


def data_dir(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """Where this user's data lives: $MINIVLLM_DATA, or what the platform has for it. Not created here.
    Raises `ConfigError` if nothing says where the home folder is."""
    if chosen := environment.get("MINIVLLM_DATA"):
        return Path(chosen)
    try:
        home = Path(environment.get("HOME") or environment.get("USERPROFILE") or Path.home())
    except RuntimeError as error:
        fix = "there is no home folder to keep answers in; set it to a folder you can write to"
        raise ConfigError("MINIVLLM_DATA", None, fix) from error
    if platform == "darwin":
        return home / "Library" / "Application Support" / "minivllm"
    if platform == "win32":
        return Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local") / "minivllm"
    return Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share") / "minivllm"


class RecallStore:
    """Attempts and cards in one SQLite file. Every `record` is on disk when it returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        with closing(self._open()) as database:
            database.executescript(_TABLES)

    def record(self, attempt: Attempt) -> Card:
        """Keep an attempt; return the row's card with its next due time."""
        previous = self.cards().get(attempt.row)
        interval = next_interval(previous.interval_days if previous else 0.0, attempt.score)
        card = Card(attempt.row, attempt.at + interval * DAY, interval)
        with closing(self._open()) as database, database:
            database.execute(
                "INSERT INTO attempt VALUES (?, ?, ?, ?, ?)",
                (attempt.row, attempt.at, attempt.score, attempt.seconds, attempt.answer),
            )
            database.execute("INSERT OR REPLACE INTO card VALUES (?, ?, ?)", (card.row, card.due_at, interval))
        return card

    def cards(self) -> dict[str, Card]:
        """Every row asked so far."""
        with closing(self._open()) as database:
            return {row[0]: Card(*row) for row in database.execute("SELECT row, due_at, interval_days FROM card")}

    def attempts(self, row: str) -> list[Attempt]:
        """All attempts at a row, oldest first."""
        with closing(self._open()) as database:
            found = database.execute(
                "SELECT row, at, score, seconds, answer FROM attempt WHERE row = ? ORDER BY at", (row,)
            )
            return [Attempt(*values) for values in found]

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path)

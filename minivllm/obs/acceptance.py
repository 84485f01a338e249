"""What came of the drafts of speculation, by their place in the row: how far ahead it pays to propose."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts that were run and those of them that were accepted, by position: 0 is the first draft of a row.

    A draft is accepted only if all before it in its row are. Not every row has as many as `spec_tokens`: a position's
    drafts are those of the rows that had one there.
    """

    drafts: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def shares(self) -> list[float]:
        """The share of the drafts that were accepted (0 to 1) at each position."""
        return [self.accepted[position] / self.drafts[position] for position in sorted(self.drafts)]

    def by_position(self) -> dict[str, list[int]]:
        """Both counts as lists, first position first, to be written as JSON."""
        positions = sorted(self.drafts)
        counts = {"drafts_by_position": self.drafts, "accepted_by_position": self.accepted}
        return {name: [count[position] for position in positions] for name, count in counts.items()}

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.drafts + other.drafts, self.accepted + other.accepted)

    def __sub__(self, earlier: Acceptance) -> Acceptance:
        return Acceptance(self.drafts - earlier.drafts, self.accepted - earlier.accepted)

    def __str__(self) -> str:
        """Such as: 83 of 139 drafts accepted, by position 1: 71%, 2: 48%. Positions are told from 1 on."""
        if not self.drafts:
            return "no drafts"
        shares = ", ".join(f"{position}: {share:.0%}" for position, share in enumerate(self.shares, 1))
        return f"{self.accepted.total():,} of {self.drafts.total():,} drafts accepted, by position {shares}"

"""Prefix hits that end inside a block: whose leading tokens are the next ones of a prompt, published or still growing.

A full block is found by one hash. Here the parents' hash is equal and the tokens are compared one by one: the block with
the longest common beginning wins. Its KV is right for those tokens and wrong for what comes after, so the one who hits it
may not hold it: it gets a copy, made before its forward runs (copy on write, with a writer that has just come).

Only what a step has really written is recorded, after the step: a copy runs before the forward, where a hash that was
published for the same step is still a promise. Blocks stay findable when nobody holds them, until they are handed out
(for those without a hash that is at once, unless `lifo_unhashed` is off).

The leading engine has such hits only where it looks prompts up by units smaller than a block (vLLM 0.32,
`prefix_match_unit`, for hybrid models): it hashes every unit of a full block instead of comparing tokens, and a block
that still grows can't be hit.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

Parent = tuple[bytes, str]
"""What a block hangs on: the hash of everything before it, and the salt."""


@dataclass(frozen=True, slots=True)
class PartialHit:
    """A block whose first `num_tokens` tokens (at least 1) can be copied."""

    block_id: int
    num_tokens: int


class PartialIndex:
    """What is written in which block, by what comes before it."""

    def __init__(self) -> None:
        self._children: dict[Parent, dict[int, tuple[int, ...]]] = {}
        self._parents: dict[int, Parent] = {}

    def record(self, block_id: int, parent: Parent, token_ids: Seq[int]) -> None:
        """A block now holds the KV of `token_ids`, from its first slot on. What was known of it before is a beginning of that."""
        self._children.setdefault(parent, {})[block_id] = tuple(token_ids)
        self._parents[block_id] = parent

    def forget(self, block_ids: Iterable[int]) -> None:
        """Blocks have been handed out: what they held is as good as gone. Unknown ones are ignored."""
        for block_id in block_ids:
            parent = self._parents.pop(block_id, None)
            if parent is not None:
                del self._children[parent][block_id]
                if not self._children[parent]:
                    del self._children[parent]

    def clear(self) -> None:
        self._children.clear()
        self._parents.clear()

    def find(self, parent: Parent, token_ids: Seq[int]) -> PartialHit | None:
        """The block behind `parent` that begins with most of `token_ids`; of equal ones the one recorded first."""
        found = None
        for block_id, known in self._children.get(parent, {}).items():
            length = common_length(known, token_ids)
            if length > (found.num_tokens if found else 0):
                found = PartialHit(block_id, length)
        return found


def common_length(one: Seq[int], other: Seq[int]) -> int:
    """How many leading elements two sequences have in common."""
    different = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))

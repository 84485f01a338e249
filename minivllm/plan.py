"""What one step runs (`StepPlan`) and what one step decided (`TraceEvent`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from minivllm.request import Sequence


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: run `num_tokens` tokens from position `start` on.

    `block_ids` is the block table after allocation: position p lives in slot
    `block_ids[p // block_size] * block_size + p % block_size`. `samples` are the sequences that draw a token from
    the logits at the row's last position: none while tokens remain, itself, or all that fork from it. `copies` are the
    block copies (source, destination) that make the row's table writable. A model whose layers form several groups
    (`kv/hybrid.py`) has a table for each: `block_ids` is the first group's, `more_block_ids` has the others'. The last
    `len(drafts)` tokens are proposals (`sample/spec.py`): each is run as if it were true, and after each of them, and
    before the first, somebody draws. `loads` are the copies (host slot, block) of KV that the row starts from.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    block_ids: list[int]
    samples: tuple[Sequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    more_block_ids: tuple[list[int], ...] = ()
    drafts: tuple[int, ...] = ()
    loads: tuple[tuple[int, int], ...] = ()

    @property
    def stop(self) -> int:
        """Position after the last token run: the context length the last token attends to."""
        return self.start + self.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """What to run. If the last token's step was on its way when this one was planned, the token may still be unknown:
        then it is the one that the sequence drew last. (On a device both are there; vLLM: `last_sampled_tokens`.)
        """
        known = [*self.sequence.tokens(self.start, self.stop), *self.drafts]
        return known if len(known) == self.num_tokens else [*known, self.sequence.last_drawn]

    def after_drafts(self, n: int) -> Sequence:
        """The row's sequence as it will be if the first `n` drafts are right: to draw from, nothing else."""
        if not n:
            return self.sequence
        return replace(self.sequence, output_token_ids=[*self.sequence.output_token_ids, *self.drafts[:n]])


Moves = tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]


@dataclass(slots=True)
class StepPlan:
    """Everything the runner needs for one forward pass. The next step must not be planned before an `awaited` one has completed.

    Before the forward come, one after the other: `stores`, copies (block, host slot) of blocks that this step may write;
    `loads`, copies (host slot, block); `copies`.
    """

    step: int
    rows: list[Row] = field(default_factory=list)
    awaited: bool = True
    stores: list[tuple[int, int]] = field(default_factory=list)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Block copies (source, destination) to run before the forward, in any order: a destination comes once, and is no source."""
        return [pair for row in self.rows for pair in row.copies]

    @property
    def loads(self) -> list[tuple[int, int]]:
        """Copies (host slot, block) from host memory."""
        return [pair for row in self.rows for pair in row.loads]

    @property
    def moves(self) -> Moves:
        """Everything that is copied before the forward, in order: stores, loads, copies."""
        return self.stores, self.loads, self.copies

    @property
    def groups(self) -> list[tuple[Sequence, ...]]:
        """Who draws from each row of the logits: one for each plan row with samples, and one more for each of its drafts."""
        groups: list[tuple[Sequence, ...]] = []
        for row in self.rows:
            if row.samples:
                groups += [row.samples, *((row.after_drafts(n + 1),) for n in range(len(row.drafts)))]
        return groups

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class EventKind(StrEnum):
    """What happened. The first seven are inputs to the scheduler, the rest what it made of them."""

    ADDED = "added"
    ABORTED = "aborted"
    COMPILED = "compiled"  # the grammar that a request waited for
    COMPLETED = "completed"  # step number `start` has run; the SAMPLED events that follow are its tokens
    SAMPLED = "sampled"
    STOPPED = "stopped"  # a stop string, found outside the scheduler
    PROPOSED = "proposed"  # drafts for a sequence: how many
    SCHEDULED = "scheduled"
    AWAITED = "awaited"  # with `async_depth`: why the next step is not planned ahead
    ACCEPTED = "accepted"  # how many tokens beyond the first a row with drafts has brought
    DROPPED = "dropped"  # what the completed step computed for a sequence that has ended or left
    HIT = "hit"
    ALLOCATED = "allocated"
    COPIED = "copied"
    FORKED = "forked"
    PUBLISHED = "published"
    WITHDRAWN = "withdrawn"
    EVICTED = "evicted"
    FREED = "freed"
    STORED = "stored"  # blocks whose copy to host memory is planned
    LOADED = "loaded"  # blocks to be filled from there
    PREEMPTED = "preempted"
    REFUSED = "refused"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a replay needs to know of a request beside its prompt."""

    n: int
    max_tokens: int
    priority: int
    arrival_time: float
    cache_salt: str
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    reads_cache: bool
    beams: bool = False
    guided: bool = False


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One decision. Unused fields keep their defaults; `blocks` are physical block ids, `token_ids` only on inputs.

    `parent` is the sequence that a fork starts from, or that a beam's token continues. `group` is the layer group whose
    table changed; a FREED event with reason "window" tells of blocks that its window left behind.
    """

    step: int
    kind: EventKind
    request: str = ""
    sequence: int = 0
    blocks: tuple[int, ...] = ()
    start: int = 0
    tokens: int = 0
    reason: str = ""
    token_ids: tuple[int, ...] = ()
    spec: RequestSpec | None = None
    parent: int | None = None
    group: int = 0


Emit = Callable[..., None]
"""`emit(kind, request=..., blocks=..., ...)`: how a part reports an event; the recorder adds the step."""


def ignore_events(kind: EventKind, **fields: object) -> None:
    """An `Emit` for those who don't listen."""

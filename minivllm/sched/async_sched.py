"""Steps on their way: planned, perhaps running, their tokens not here yet.

With `async_depth=1` step n + 1 is planned while step n runs, so that a device never waits for a scheduler. A plan needs to
know how many tokens there are, not which. So a token to be drawn counts as soon as the step that draws it is planned, as
a placeholder; the row that runs it takes it from where it was drawn (`Row.token_ids`), before the scheduler has heard of
it. What follows from planning too early:

* A token that ends its sequence (end of sequence, stop id, stop string) comes when the sequence's next row is planned
  already. That row runs for nothing: its token is dropped, one slot a stop. A stop by length is known before: no slot.
* Who is preempted may have a row on its way. That row's token is dropped and drawn again: the same, since draws depend on
  the position alone.
* Only known tokens have hashes: a block is published when its last token has come.
* Blocks that a step on its way reads or writes are handed to nobody else before it has completed. On one stream that
  runs steps in order nothing would go wrong; whoever reads blocks beside it (copies to host memory) needs the rule.
* An answer of several, all from one prompt, forks when the prompt's step has completed: such a request leaves a step out.
* What decides about blocks can't come late: while beams run, every step is awaited (`why_awaited`).

Source: vLLM 0.32 `v1/core/sched/async_scheduler.py`, `v1/engine/core.py:step_with_batch_queue`. There stale tokens of a
preempted request are delivered all the same, blocks are fenced only for transfers beside the stream, and the switch goes
off for a whole engine, by what it was started with.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

from minivllm.config import EngineConfig
from minivllm.kv.manager import KVCacheManager
from minivllm.kv.offload import Offload
from minivllm.plan import Emit, EventKind, Row, StepPlan
from minivllm.request import Request, Sequence, Status


class InFlight:
    """The steps that are planned and not completed, and the sequences whose blocks come back when they are."""

    def __init__(self, config: EngineConfig, kv: KVCacheManager, offload: Offload, emit: Emit) -> None:
        self.plans: dict[int, StepPlan] = {}
        self.leaving: dict[int, Sequence] = {}  # by uid: in `kv.tables` they still have theirs
        self._depth = config.async_depth
        self.num_recomputed = 0  # tokens run again after a preemption
        self._kv, self._offload = kv, offload
        self._emit = emit

    def launch(self, plan: StepPlan, running: Iterable[Request]) -> None:
        """A step is planned. Counters advance at once, as if it had run; each token that it will draw gets a placeholder.

        Sets `plan.awaited`, and reports why if that isn't so for every step.
        """
        reason = why_awaited(running) if self._depth else ""
        plan.awaited = bool(reason) or not self._depth
        if reason:
            self._emit(EventKind.AWAITED, reason=reason)
            log_awaited(reason)
        if plan.rows:
            self.plans[plan.step] = plan
            self._offload.launch(plan)
        for row in plan.rows:
            self._advance(row)
            for sequence in row.samples:
                sequence.num_placeholders += 1

    def _advance(self, row: Row) -> None:
        sequence = row.sequence
        sequence.num_computed = row.stop
        self.num_recomputed += max(min(row.stop, sequence.most_computed) - row.start, 0)
        sequence.most_computed = max(sequence.most_computed, row.stop)

    def land(self, plan: StepPlan) -> None:
        """A step has completed: its copies are made, and blocks that waited for it alone are free."""
        self._emit(EventKind.COMPLETED, start=plan.step)
        del self.plans[plan.step]
        self._kv.release(plan.copies)
        self._offload.land(plan)
        for sequence in [s for s in self.leaving.values() if not self._touches(s)]:
            del self.leaving[sequence.uid]
            self._kv.free(sequence)

    def drop(self, row: Row) -> None:
        """Report a row that ran for nothing: see `is_stale`."""
        reason, who = "finished" if row.sequence.finished else "preempted", row.sequence
        self._emit(EventKind.DROPPED, request=who.request.id, sequence=who.index, tokens=row.num_tokens, reason=reason)

    def free(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back: now, or when the last step that touches them has completed."""
        if self._touches(sequence):
            self.leaving[sequence.uid] = sequence
        else:
            self._kv.free(sequence)

    @property
    def keeps_blocks(self) -> bool:
        """Whether blocks come back when a step on its way has completed: of those who leave, or as ends of copies.

        Waiting for them isn't only kinder than a preemption. A request alone that preempts itself while its row is on its
        way loses that token, and may come back to the same place for ever.
        """
        return bool(self.leaving) or any(plan.copies for plan in self.plans.values())

    def _touches(self, sequence: Sequence) -> bool:
        return any(row.sequence is sequence for plan in self.plans.values() for row in plan.rows)


def is_stale(row: Row) -> bool:
    """Whether nobody waits any more for what a row computed: its sequence ended, or its request was preempted, meanwhile."""
    return row.sequence.finished or row.sequence.request.status is not Status.RUNNING


@cache
def log_awaited(reason: str) -> None:
    """Say once for each reason that async scheduling pauses."""
    logging.getLogger(__name__).info("steps are planned one at a time, while there are %s", reason)


def why_awaited(running: Iterable[Request]) -> str:
    """Why the next step can't be planned before this one has completed, if these requests run; "" if it can.

    Not on the list, because counts are enough for them: grammars (only their drawing waits), penalties, log-probabilities
    of answers or prompts, stop strings, `n`, `partial_block_hits`.
    """
    beams = any(request.beams for request in running)
    return "beams: tokens say which of them go on, and in which blocks" if beams else ""

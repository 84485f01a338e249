"""Who runs in the next step, with how many tokens, in which blocks.

There is no prefill phase and no decode phase. A sequence knows some tokens and has computed some; one token budget a
step is handed out so that computed catches up with known. Chunked prefill, decode and the recomputation after a
preemption are the same operation with different deficits, and so are proposed tokens (`propose`): they count as known
until the step that runs them says which of them are right. Running requests come first, then waiting ones; a step that
had to preempt admits nobody.

Source: vLLM 0.32 `v1/core/sched/scheduler.py:Scheduler.schedule` (966 lines; left out: encoder inputs, LoRA, remote KV,
pipeline stagger). Different by decision: the request with all its sequences is the unit of admission and
preemption, because its sequences share blocks that only exist while they are together.

Beams are sequences of one request that step together: all of them run their last token in the same step, or none does,
because the next tokens are chosen among the candidates of all. What was chosen comes back as (parent, token) pairs:
`update` prunes beams without a child and forks those with several. Which tokens are chosen is `sample/beam.py`'s matter.
The leading engine has no beams in its scheduler: its front end sends one-token requests (`tests/beam_client.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from minivllm.config import ConfigError, EngineConfig, RequestError
from minivllm.kv.hybrid import ONE_GROUP, Windows, longest_request, make_manager, request_blocks
from minivllm.kv.offload import Move, Offload
from minivllm.plan import EventKind, Row, StepPlan
from minivllm.request import FinishReason, Request, SampledToken, Sequence, Status
from minivllm.sched.async_sched import InFlight, is_stale
from minivllm.sched.deficit import draft_room, runnable, target
from minivllm.sched.policy import make_queue, pick_victim
from minivllm.sched.trace import Recorder, spec_of


@dataclass(slots=True)
class Step:
    """A step in the making: the plan, the budget that is left, and whether blocks ran short for a running sequence."""

    plan: StepPlan
    budget: int
    short: bool = False


class Scheduler:
    """Hands out one token budget a step over running and waiting requests.

    `num_blocks` counts the null block; `max_model_len` is in tokens, prompt and output together; `windows` has the
    attention window of each layer group (`kv/hybrid.py`).
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        recorder: Recorder | None = None,
        windows: Windows = ONE_GROUP,
    ) -> None:
        self.config = config
        self.windows = windows
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.recorder = recorder or Recorder()
        self.kv = make_manager(config, num_blocks, windows, self.recorder.emit)
        self.offload = Offload(config, self.kv, windows, self.recorder.emit)
        self.in_flight = InFlight(config, self.kv, self.offload, self.recorder.emit)
        self.waiting = make_queue(config.policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_drafts, self.num_accepted = Counter[int](), Counter[int]()  # by place in the row, from 0 on
        self._uids = count()
        self._check_config()

    def _check_config(self) -> None:
        needed, usable = request_blocks(self.max_model_len, self.windows, self.config), self.kv.pool.num_usable
        if needed > usable:
            raise ConfigError(
                "num_kv_blocks",
                usable + 1,
                f"one request of max_model_len={self.max_model_len} needs {needed} blocks of {self.config.block_size} tokens,"
                f" {usable} are usable; give more memory or set max_model_len to at most"
                f" {longest_request(usable, self.windows, self.config, self.max_model_len)}",
            )
        if not self.config.enable_chunked_prefill and self.config.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                self.config.max_num_batched_tokens,
                f"without chunked prefill a prompt must fit one step: raise it to max_model_len={self.max_model_len},"
                " lower max_model_len, or turn enable_chunked_prefill on",
            )

    # requests in and out

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` if it can never run: no other request notices."""
        self.check(request)
        for sequence in request.sequences:
            sequence.uid = next(self._uids)
        if request.params.guided is not None:
            request.status = Status.WAITING_FOR_GRAMMAR
        self.requests[request.id] = request
        self.waiting.push(request)
        self.recorder.emit(
            EventKind.ADDED, request=request.id, token_ids=tuple(request.prompt_token_ids), spec=spec_of(request)
        )

    def check(self, request: Request) -> None:
        """Raise `RequestError`, with the arithmetic, unless this request can run to its end in an otherwise empty engine."""
        prompt = len(request.prompt_token_ids)
        if request.id in self.requests:
            raise RequestError("request_id", request.id, "is in use by an unfinished request")
        if not prompt:
            raise RequestError("prompt", [], "must hold at least one token")
        if prompt + request.max_tokens > self.max_model_len:
            raise RequestError(
                "prompt",
                f"{prompt} tokens",
                f"prompt and max_tokens={request.max_tokens} exceed max_model_len={self.max_model_len}",
            )
        n, name = request.params.n, "width" if request.beams else "n"
        if n > self.config.max_num_seqs:
            raise RequestError(name, n, f"must be at most max_num_seqs={self.config.max_num_seqs}")
        if request.beams and n > self.config.max_num_batched_tokens:
            raise RequestError(
                name,
                n,
                f"beams step together: must be at most max_num_batched_tokens={self.config.max_num_batched_tokens}",
            )
        # the last token drawn is never run, so it needs no slot
        needed = self.kv.blocks_of_request(request, [prompt + request.max_tokens - 1] * n)
        if needed > self.kv.pool.num_usable:
            raise RequestError(
                name if n > 1 else "max_tokens",
                n if n > 1 else request.max_tokens,
                f"{n} x ({prompt} prompt + {request.max_tokens} new) tokens can grow to {needed} blocks of"
                f" {self.config.block_size}, {self.kv.pool.num_usable} are usable; shorten the request or give more KV memory",
            )

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown or finished ids are ignored (the answer may have just been sent)."""
        request = self.requests.get(request_id)
        if request is None:
            return
        self.recorder.emit(EventKind.ABORTED, request=request_id)
        for sequence in request.live:
            self._finish(sequence, FinishReason.ABORT)

    def grammar_compiled(self, request_id: str) -> None:
        """Let a request run that waited for its grammar: nothing else changes its place in the queue."""
        self.recorder.emit(EventKind.COMPILED, request=request_id)
        self.requests[request_id].status = Status.WAITING

    def stop(self, sequence: Sequence, reason: str) -> None:
        """End a sequence because of a stop string, which is found outside: the scheduler knows no text."""
        self.recorder.emit(EventKind.STOPPED, request=sequence.request.id, sequence=sequence.index, reason=reason)
        sequence.stop_reason = reason
        self._finish(sequence, FinishReason.STOP)

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    # one step: propose if you like, schedule, then update with what was drawn

    def decoding(self) -> list[Sequence]:
        """The sequences that drafts could help in the next step."""
        return [s for request in self.running for s in request.live if draft_room(s) > 0]

    def propose(self, sequence: Sequence, drafts: Iterable[int]) -> None:
        """Guess the next tokens of a sequence, for the next step alone; those that it has no use for are left out.

        Only how many there are counts here: -1 stands for a draft that is known when the step runs (`Row.drafts`).
        """
        sequence.drafts = list(drafts)[: draft_room(sequence)]
        if sequence.drafts:
            who = sequence.request.id, sequence.index
            self.recorder.emit(EventKind.PROPOSED, request=who[0], sequence=who[1], tokens=len(sequence.drafts))

    def schedule(self) -> StepPlan:
        """Plan the next step: `update` must have taken in the one before if that was `awaited`, else the one before that."""
        self.recorder.step += 1
        step = Step(StepPlan(self.recorder.step), self.config.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.short:
            self._schedule_waiting(step)
        self.kv.add_tables(step.plan.rows)
        for row in step.plan.rows:
            who = row.sequence
            self.recorder.emit(
                EventKind.SCHEDULED, request=who.request.id, sequence=who.index, start=row.start, tokens=row.num_tokens
            )
        for request in self.running:
            for sequence in request.live:
                sequence.drafts = []  # those that found no room are forgotten
            if request.beams:
                request.peak_blocks = max(request.peak_blocks, self.kv.num_held(request))
        self.in_flight.launch(step.plan, self.running)
        return step.plan

    def _schedule_running(self, step: Step) -> None:
        """Give every running sequence its deficit, in order of admission, as far as budget and blocks go."""
        for request in list(self.running):
            for sequence in runnable(request, step.budget):
                if request.status is not Status.RUNNING:
                    break  # preempted for the sake of an earlier one
                num_new = self._share(step, target(sequence) - sequence.num_computed, splits=bool(sequence.drafts))
                if num_new == 0:
                    continue  # not strictly first come, first served: others may still fit
                copies = self._allocate_or_preempt(step, sequence, num_new)
                if copies is None:
                    return  # left, or waits for blocks: nobody behind it is tried
                self._plan_row(step, sequence, num_new, copies)

    def _share(self, step: Step, deficit: int, *, splits: bool = False) -> int:
        """How much of a deficit this step may run: capped by budget and threshold; without chunking all or nothing, unless
        it `splits` anyway."""
        threshold = self.config.long_prefill_threshold
        if threshold and len(self.requests) > 1:
            deficit = min(deficit, threshold)
        if deficit > step.budget:
            return step.budget if splits or self.config.enable_chunked_prefill else 0
        return deficit

    def _allocate_or_preempt(self, step: Step, sequence: Sequence, num_new: int) -> list[tuple[int, int]] | None:
        """Find blocks for a running sequence, preempting victims until they suffice.

        None if it became one itself, or if blocks come back when a step on its way has completed: then it waits for them.
        """
        while (copies := self.kv.allocate(sequence, num_new)) is None:
            step.short = True
            if self.in_flight.keeps_blocks:
                return None
            victim = pick_victim(self.running, self.config.policy)
            self._preempt(step, victim)
            if victim is sequence.request:
                return None
        return copies

    def _preempt(self, step: Step, request: Request) -> None:
        """Take all blocks of a request back; it waits again with nothing computed. What it published stays hittable."""
        rows = [row for row in step.plan.rows if row.sequence.request is request]
        reason = self.offload.swap_out(request, rows)
        for row in rows:
            step.plan.rows.remove(row)
            step.budget += row.num_tokens
            self.kv.withdraw(row.sequence)  # those hashes promise KV that this step will not write
            self.kv.release(row.copies)
        for sequence in request.live:
            self.in_flight.free(sequence)
            sequence.num_computed = sequence.num_placeholders = 0
            sequence.drafts = []
        request.forked = len(request.live) == 1
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.running.remove(request)
        self.waiting.push_back(request)
        self.recorder.emit(EventKind.PREEMPTED, request=request.id, reason=reason)

    def _schedule_waiting(self, step: Step) -> None:
        """Admit waiting requests in order while they fit. The first that doesn't blocks those behind it: that is the fairness.

        Those that wait for a grammar block nobody: they are set aside, and put back in front.
        """
        if self.config.policy == "static" and self.running:
            return
        set_aside: list[Request] = []
        while self.waiting and step.budget:
            request = self.waiting.peek()
            if request.status is Status.WAITING_FOR_GRAMMAR:
                set_aside.append(self.waiting.pop())
                continue
            reason = self._admit(step, request)
            if reason:
                self.recorder.emit(EventKind.REFUSED, request=request.id, reason=reason)
                break
        for request in reversed(set_aside):
            self.waiting.push_back(request)

    def _admit(self, step: Step, request: Request) -> str:
        """Move the head of the queue to the running ones, with its first row; else say what is short."""
        if sum(len(r.live) for r in self.running) + len(request.live) > self.config.max_num_seqs:
            return "max_num_seqs"
        trunk = request.live[0]
        hits = self.kv.lookup(trunk, target(trunk))
        partial = self.kv.lookup_partial(trunk, hits, target(trunk))
        in_host = self.offload.lookup(trunk, len(hits), target(trunk))
        num_cached = self.kv.num_cached(hits, partial) + in_host.num_tokens
        num_new = self._share(step, target(trunk) - num_cached)
        if num_new == 0:
            return "budget"
        others_run = bool(self.running)
        if self.config.reserve_full_prompt and not self.kv.fits_whole(request, hits, watermark=others_run):
            return "blocks for the whole prompt"
        copies = self.kv.allocate(trunk, in_host.num_tokens + num_new, hits, partial, watermark=others_run)
        if copies is None:
            return "blocks"
        self._start(request, trunk, num_cached)
        self._plan_row(step, trunk, num_new, copies, self.offload.load(trunk, len(hits), in_host))
        return ""

    def _start(self, request: Request, trunk: Sequence, num_cached: int) -> None:
        trunk.num_computed = num_cached
        if request.status is Status.WAITING:
            request.num_cached_tokens = trunk.num_computed
            self.kv.record_lookup(trunk, trunk.num_computed)
        self.waiting.pop()
        request.status = Status.RUNNING
        self.running.append(request)

    def _plan_row(
        self, step: Step, sequence: Sequence, num_new: int, copies: list[Move], loads: tuple[Move, ...] = ()
    ) -> None:
        start = sequence.num_computed
        samples: tuple[Sequence, ...] = ()
        num_drafts = start + num_new - sequence.num_expected
        if num_drafts >= 0:
            samples = (sequence,)
        if not sequence.request.forked:
            fresh = not sequence.output_token_ids
            samples = tuple(sequence.request.live) if samples and fresh else ()
        drafts = tuple(sequence.drafts[: max(num_drafts, 0)])
        table = self.kv.block_ids(sequence)
        row = Row(sequence, start, num_new, table, samples, tuple(copies), drafts=drafts, loads=loads)
        step.plan.rows.append(row)
        step.budget -= num_new

    def update(self, plan: StepPlan, drawn: list[list[SampledToken]]) -> list[tuple[Sequence, SampledToken]]:
        """Take in what a step drew: `drawn` has one list for each row with samples, in order. Returns what was appended.

        The list of a row with drafts has the tokens of its one sequence: the drafts that were right, and one more. Those
        after a token that ends the sequence are left out.

        Rows of requests that were aborted or preempted meanwhile, and of sequences that ended, are dropped. A token with
        a parent continues that sequence of its request, which must go on itself: it is the parent of its own token.
        """
        if not plan.rows:
            return []
        self.in_flight.land(plan)
        appended: list[tuple[Sequence, SampledToken]] = []
        checked: list[Row] = []
        tokens = iter(drawn)
        for row in plan.rows:
            row_tokens = next(tokens) if row.samples else []
            if is_stale(row):
                self.in_flight.drop(row)
                continue
            for sequence in row.samples:
                sequence.num_placeholders -= 1
            known = row.stop - len(row.drafts)
            self.kv.record_written(row.sequence, row.start, known)
            if self.config.publish_at == "compute":
                self.kv.publish(row.sequence, known)
            self.offload.store_computed(row)
            if not row.sequence.request.forked and row.stop == target(row.sequence):
                self._fork(row.sequence)
            if row.drafts:
                row.sequence.num_computed -= len(row.drafts) + 1 - len(row_tokens)
                checked.append(row)
            appended += zip(row.samples * (len(row.drafts) + 1), row_tokens, strict=not row.drafts)
        self._fork_beams(appended)
        appended = [(sequence, token) for sequence, token in appended if self._append(sequence, token)]
        for row in checked:
            self._count_drafts(row, sum(sequence is row.sequence for sequence, _ in appended) - 1)
        return appended

    def _count_drafts(self, row: Row, num_accepted: int) -> None:
        request = row.sequence.request
        request.num_drafts += len(row.drafts)
        request.num_accepted += num_accepted
        self.num_drafts.update(range(len(row.drafts)))
        self.num_accepted.update(range(num_accepted))
        self.recorder.emit(
            EventKind.ACCEPTED, request=request.id, sequence=row.sequence.index, start=row.start, tokens=num_accepted
        )

    def _fork(self, trunk: Sequence) -> None:
        """The prompt's KV is there: the request's other sequences start from it."""
        for child in trunk.request.live:
            if child is not trunk:
                self.kv.fork(trunk, child)
        trunk.request.forked = True

    def _fork_beams(self, drawn: list[tuple[Sequence, SampledToken]]) -> None:
        """Prune the beams that nothing continues, and let their sequences go on from the parents they got."""
        moved = [(s, s.request.sequences[token.parent]) for s, token in drawn if token.parent is not None]
        for sequence, _ in moved:
            self.kv.free(sequence)
        for sequence, parent in moved:
            self.kv.fork(parent, sequence)
            sequence.output_token_ids[:] = parent.output_token_ids
            sequence.logprobs[:] = parent.logprobs

    def _append(self, sequence: Sequence, token: SampledToken) -> bool:
        """Add a token to a sequence and end that if it does; False if it has ended already, by a token of this step."""
        if sequence.finished:
            return False
        request = sequence.request
        drawn = (token.token_id,)
        self.recorder.emit(
            EventKind.SAMPLED, request=request.id, sequence=sequence.index, token_ids=drawn, parent=token.parent
        )
        sequence.output_token_ids.append(token.token_id)
        if token.logprob is not None:
            sequence.logprobs.append(token.logprob)
        if not request.params.ignore_eos and token.token_id in self.eos_token_ids:
            self._finish(sequence, FinishReason.STOP)
        elif token.token_id in request.params.stop_token_ids:
            sequence.stop_reason = token.token_id
            self._finish(sequence, FinishReason.STOP)
        elif len(sequence.output_token_ids) >= request.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)
        elif self.config.publish_at == "schedule":
            self.kv.publish(sequence, sequence.num_computed)  # a row may have waited for this token
        return True

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence; with its last one the request ends too."""
        sequence.finish_reason = reason
        self.in_flight.free(sequence)
        self.offload.forget(sequence)
        request = sequence.request
        self.recorder.emit(EventKind.FINISHED, request=request.id, sequence=sequence.index, reason=str(reason))
        if request.live:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        del self.requests[request.id]

    def integrity(self) -> None:
        """Raise `AssertionError` unless every request is in exactly one place and the cache's books balance."""
        self.kv.integrity()
        self.offload.integrity()
        waiting = list(self.waiting)
        assert {r.id for r in waiting} | {r.id for r in self.running} == set(self.requests), "a request is lost"
        assert len(waiting) + len(self.running) == len(self.requests), "a request is in two places"
        assert all(
            s.num_computed == 0 and (s.uid not in self.kv.tables or s.uid in self.in_flight.leaving)
            for r in waiting
            for s in r.live
        ), "a waiting request holds blocks"

"""A scheduler whose every step is checked: the cache by a model of the physical slots, the decisions by their rules.

`PhysicalSlots` stands where KV memory is. Each slot remembers which prefix its KV was computed from; every read checks
every position that it attends to. It knows nothing of blocks, hashes or references, so it believes nobody's bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from minivllm.config import EngineConfig, RequestError
from minivllm.kv.block_pool import NULL_BLOCK
from minivllm.kv.hybrid import ONE_GROUP, Windows
from minivllm.plan import EventKind, Row, StepPlan, TraceEvent
from minivllm.request import FinishReason, Request, SampledToken, Sequence
from minivllm.sample.beam import assign_slots
from minivllm.sched.policy import rank
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import Recorder, TraceHeader, dump_event, load_event, replay
from tests.host_slots import check_moves, check_promises, move_blocks
from tests.lattice import Device

EMPTY = 0

Draw = Callable[[Sequence], int]


class PhysicalSlots:
    """Every slot holds the number of the prefix (all tokens up to and with its own) whose KV was written there."""

    def __init__(self, num_blocks: int, block_size: int, windows: Windows = ONE_GROUP) -> None:
        self.block_size, self.windows = block_size, windows
        self.slots = [EMPTY] * (num_blocks * block_size)
        self.host: dict[int, list[int]] = {}  # what each slot of host memory holds
        self._numbers: dict[tuple[int, int], int] = {}

    def prefixes(self, tokens: Iterable[int]) -> list[int]:
        """One number a position; equal numbers mean equal prefixes."""
        numbers, number = [], EMPTY
        for token in tokens:
            number = self._numbers.setdefault((number, token), len(self._numbers) + 1)
            numbers.append(number)
        return numbers

    def slot(self, block_ids: list[int], position: int) -> int:
        index, offset = divmod(position, self.block_size)
        assert index < len(block_ids), f"position {position} lies beyond a table of {len(block_ids)} blocks"
        return block_ids[index] * self.block_size + offset

    def execute(self, plan: StepPlan) -> None:
        """As a runner does: store, load, copy (all sources first), write all rows, then read all rows."""
        move_blocks(self, plan)
        self._copy(plan.copies)
        wanted = [self.prefixes(row.sequence.tokens(0, row.start) + row.token_ids) for row in plan.rows]
        written: set[int] = set()
        for row, prefixes in zip(plan.rows, wanted, strict=True):
            for group, table in enumerate(self.tables(row)):
                for position in range(row.start, row.stop):
                    slot = self.slot(table, position)
                    assert slot not in written, f"slot {slot} is written twice in step {plan.step}"
                    written.add(slot)
                    self.slots[slot] = prefixes[position] * len(self.windows) + group
        for row, prefixes in zip(plan.rows, wanted, strict=True):
            for group, (table, window) in enumerate(zip(self.tables(row), self.windows, strict=True)):
                first = max(row.start + 1 - window, 0) if window else 0
                assert NULL_BLOCK not in table[first // self.block_size :], f"{row.sequence} needs the null block"
                for position in range(first, row.stop):
                    held = self.slots[self.slot(table, position)]
                    expected = prefixes[position] * len(self.windows) + group
                    assert held == expected, f"{row.sequence} reads foreign KV at position {position}"

    def tables(self, row: Row) -> tuple[list[int], ...]:
        return row.block_ids, *row.more_block_ids

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        size = self.block_size
        read = [self.slots[source * size : (source + 1) * size] for source, _ in pairs]
        for content, (_, target) in zip(read, pairs, strict=True):
            self.slots[target * size : (target + 1) * size] = content

    def written_by(self, plan: StepPlan) -> set[int]:
        """Blocks that hold something new once a plan has run."""
        positions = [(row, range(row.start, row.stop)) for row in plan.rows]
        loaded = {block for _, block in plan.loads}
        return loaded | {self.slot(row.block_ids, p) // self.block_size for row, some in positions for p in some}

    def last_of(self, block_id: int) -> int:
        """The prefix in a block's last slot: of a full block, all that it stands for."""
        return self.slots[(block_id + 1) * self.block_size - 1]


class CheckedScheduler:
    """Runs a scheduler over physical slots and raises `AssertionError` at the first step that breaks a rule."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        eos: tuple[int, ...] = (),
        *,
        trust: bool = False,
        windows: Windows = ONE_GROUP,
    ) -> None:
        self.config = config
        self.header = TraceHeader(config, num_blocks, max_model_len, eos, windows)
        self.scheduler = Scheduler(config, num_blocks, max_model_len, eos, Recorder(keep=None), windows)
        self.slots = PhysicalSlots(num_blocks, config.block_size, windows)
        self.trust = trust  # leave the scheduler's own integrity check out: the slots must find the fault alone
        self.requests: list[Request] = []
        self._meaning: dict[bytes, int] = {}
        self._tenure: dict[str, Tenure] = {}
        self._snapshots: dict[int, object] = {}
        self._device = Device(self._execute)
        self._flying: list[StepPlan] = []
        self._wasted: set[tuple[int, int]] = set()

    # inputs

    def add(self, request: Request) -> bool:
        """Add; False if refused, and then nothing may have changed."""
        before = snapshot(self.scheduler)
        try:
            self.scheduler.add(request)
        except RequestError:
            assert snapshot(self.scheduler) == before, "a refused request left traces"
            return False
        self.requests.append(request)
        return True

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request.id)
        self.check_books()
        assert request.finished

    # one step

    def step(self, draw: Draw, *, leaving: Iterable[Request] = (), at_stop_string: Iterable[int] = ()) -> StepPlan:
        """A step in which `leaving` abort while a forward runs, and the `at_stop_string`-th drawn tokens end a text.

        What completes in it is this step or, where that isn't awaited, the one before.
        """
        scheduler = self.scheduler
        self._snapshots[scheduler.recorder.step] = snapshot(scheduler)
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        computed = {s.uid: s.num_computed for r in running for s in r.sequences}
        mark = len(scheduler.recorder.events)
        plan = scheduler.schedule()
        events = list(scheduler.recorder.events)[mark:]
        self._check_rows(plan, computed)
        self._check_order(running, waiting, events)
        self._check_in_flight(events)
        check_moves(plan, self._flying)
        self._account(events)
        self._draw = draw
        if plan.rows:
            self._device.launch(plan)
            self._flying.append(plan)
        self._learn_hashes()
        for request in leaving:
            scheduler.abort(request.id)
        while self._flying and (self._flying[0] is not plan or plan.awaited):
            drawn = scheduler.update(self._flying[0], self._device.wait(self._flying.pop(0)))
            for index in at_stop_string:
                if index < len(drawn) and not drawn[index][0].finished:
                    scheduler.stop(drawn[index][0], "stop")
            self._note_waste()
        self._check_published()
        check_promises(self.slots, self.scheduler.offload.tier, self._meaning)
        self.check_books()
        return plan

    def _execute(self, plan: StepPlan) -> list[list[SampledToken]]:
        self.slots.execute(plan)
        return draw_all(plan, self._draw)

    def _check_in_flight(self, events: list[TraceEvent]) -> None:
        """No block that a step on its way reads or writes is handed out."""
        taken = {block for e in events if e.kind is EventKind.ALLOCATED for block in e.blocks}
        for plan in self._flying:
            touched = {block for row in plan.rows for block in row.block_ids}.union(*plan.copies)
            assert not (taken & touched), f"blocks {taken & touched} are handed out while step {plan.step} uses them"

    def _note_waste(self) -> None:
        """Rows on their way for nothing: of sequences that a token has stopped, one slot each, and of no others."""
        for plan in self._flying:
            for row in plan.rows:
                request, key = row.sequence.request, (plan.step, row.sequence.uid)
                if row.sequence.finished and key not in self._wasted:
                    self._wasted.add(key)
                    assert row.sequence.finish_reason is not FinishReason.LENGTH, "the length was known before"
                    assert row.num_tokens == 1 or row.sequence.finish_reason is FinishReason.ABORT
                    if request.id in self._tenure:
                        self._tenure[request.id].wasted += row.num_tokens

    def _check_rows(self, plan: StepPlan, computed: dict[int, int]) -> None:
        config = self.config
        assert plan.num_tokens <= config.max_num_batched_tokens, "over budget"
        assert len({row.sequence.uid for row in plan.rows}) == len(plan.rows), "a sequence has two rows"
        for row in plan.rows:
            self._check_row(row, computed)
        self._check_beams(plan)
        running = [s for r in self.scheduler.running for s in r.live]
        assert len(running) <= config.max_num_seqs
        if config.policy != "priority":
            assert plan.rows or self._flying or not self.scheduler.has_requests, (
                "first come, first served always has somebody to run"
            )

    def _check_row(self, row: Row, computed: dict[int, int]) -> None:
        config, sequence = self.config, row.sequence
        request = sequence.request
        expected = sequence.num_expected - (sequence in row.samples)  # before this step was planned
        assert row.num_tokens >= 1
        assert row.stop <= expected <= self.header.max_model_len
        assert row.stop == sequence.num_computed, "counters advance at once"
        assert row.start == computed.get(sequence.uid, row.start), "a sequence goes on where it stood"
        for table, window in zip(self.slots.tables(row), self.header.windows, strict=True):
            assert len(table) == -(-row.stop // config.block_size), "a table holds exactly the blocks it needs"
            cap = -(-(window - 1 + config.max_num_batched_tokens) // config.block_size) + 1 if window else len(table)
            assert sum(block_id != NULL_BLOCK for block_id in table) <= cap, "a window holds more than its cap"
        if config.long_prefill_threshold and len(self.scheduler.requests) > 1:
            assert row.num_tokens <= config.long_prefill_threshold
        target = expected - self._waits(request, computed) if request.forked else sequence.num_prompt
        if not config.enable_chunked_prefill:
            assert row.stop == target, "a prompt was split"
        assert set(row.samples) == (self._samplers(row) if row.stop == expected else set())

    def _waits(self, request: Request, computed: dict[int, int]) -> bool:
        """Whether beams must catch up before any of them draws."""
        behind = [s for s in request.live if s.num_tokens - computed.get(s.uid, 0) > 1]
        return request.beams is not None and len(request.live) > 1 and bool(behind)

    def _check_beams(self, plan: StepPlan) -> None:
        """All beams of a request draw in the same step, or none."""
        for request in self.scheduler.running:
            if request.beams and request.forked:
                drawing = {row.sequence for row in plan.rows if row.samples and row.sequence.request is request}
                assert drawing in (set(), set(request.live)), "beams don't step together"

    def _samplers(self, row: Row) -> set[Sequence]:
        request = row.sequence.request
        return {row.sequence} if request.forked else set(request.live)

    def _check_order(self, running: list[Request], waiting: list[Request], events: list[TraceEvent]) -> None:
        scheduler, policy = self.scheduler, self.config.policy
        admitted = [r for r in scheduler.running if r not in running]
        victims = [e.request for e in events if e.kind is EventKind.PREEMPTED]
        assert admitted == waiting[: len(admitted)], "somebody jumped the queue"
        assert not (victims and admitted), "a step that preempts admits nobody"
        assert not (policy == "static" and running and admitted), "a static batch let somebody in"
        least = sorted(running, key=rank) if policy == "priority" else running
        assert victims == [r.id for r in reversed(least)][: len(victims)], "the wrong victim"
        if policy == "fcfs":
            arrival = [r.sequences[0].uid for r in [*scheduler.running, *scheduler.waiting]]
            assert arrival == sorted(arrival), "admission order isn't arrival order"

    def _account(self, events: list[TraceEvent]) -> None:
        """Follow each request from its latest admission on: what it found cached and what it ran."""
        hits = {e.request: e.tokens for e in events if e.kind is EventKind.HIT}
        hits |= {e.request: hits.get(e.request, 0) + e.tokens for e in events if e.kind is EventKind.LOADED}
        for event in events:
            if event.kind is EventKind.PREEMPTED:
                del self._tenure[event.request]
        for event in events:
            if event.kind is EventKind.SCHEDULED:
                if event.request not in self._tenure:
                    live = self.scheduler.requests[event.request].live
                    self._tenure[event.request] = Tenure(live, hits.get(event.request, 0))
                self._tenure[event.request].ran += event.tokens

    def _check_published(self) -> None:
        """Every hash in the index keeps its promise: the block's KV is that of exactly this prefix."""
        self._learn_hashes()
        due = {block for plan in self._device.queue for block in self.slots.written_by(plan)}
        for block_hash, copies in self.scheduler.kv.pool.published.items():
            for block_id in copies:
                if block_id in due:
                    continue
                prefix, group = divmod(self.slots.last_of(block_id), len(self.header.windows))
                assert prefix == self._meaning[block_hash[:32]][0], f"block {block_id} lies"
                assert group == int.from_bytes(block_hash[32:]), f"block {block_id} is of another group"

    def _learn_hashes(self) -> None:
        """Note which prefix each hash stands for; a beam that is pruned takes its tokens along."""
        size = self.config.block_size
        for request in self.requests:
            for sequence in request.sequences:
                prefixes = self.slots.prefixes(sequence.tokens(0, sequence.num_tokens))
                for i, block_hash in enumerate(self.scheduler.kv.hashes(sequence)):
                    meaning = (prefixes[(i + 1) * size - 1], request.cache_salt)
                    assert self._meaning.setdefault(block_hash, meaning) == meaning, "one hash, two prefixes"

    def check_books(self) -> None:
        """References, free list, index, queues; and every ended request's token account."""
        if not self.trust:
            self.scheduler.integrity()
        for request in self.requests:
            assert request.finished == (request.id not in self.scheduler.requests)
            assert request.finished == (not request.live)
            for sequence in request.sequences:
                assert len(sequence.output_token_ids) <= request.max_tokens
            if request.finished and request.id in self._tenure:
                self._tenure.pop(request.id).check(request)

    # the end

    def drain(self, draw: Draw) -> int:
        """Run until all are done, within the proven number of steps; returns how many it took."""
        bound = self.bound()
        for number in range(bound + 1):
            if not self.scheduler.has_requests and not self._flying:
                break
            assert number < bound, f"not done after {bound} steps: a livelock"
            self.step(draw)
        kv = self.scheduler.kv
        assert kv.pool.num_free == kv.pool.num_usable, "blocks leaked"
        assert not kv.all_tables()
        assert not self._tenure
        return number

    def bound(self) -> int:
        """Steps that suffice once nobody new arrives.

        First come, first served: the first running request is never a victim (alone it fits), and every step moves it
        by a token or admits it, so the work of all, recomputation included, is enough. Priority: at worst that work
        passes twice for each request before the most important one is first in line and done.
        """
        live = list(self.scheduler.requests.values())
        work = sum(len(r.prompt_token_ids) + len(r.sequences) * r.max_tokens for r in live)
        depth = self.config.async_depth
        work *= 1 + depth  # every other step may wait for blocks, or for a fork
        return depth + (work if self.config.policy != "priority" else 2 * len(live) * (work + len(live)))

    def check_replay(self) -> None:
        """The trace alone, read back from its text, leads through the same states."""
        recorder = self.scheduler.recorder
        self._snapshots[recorder.step] = snapshot(self.scheduler)
        events = [load_event(dump_event(event)) for event in recorder.events]
        assert events == list(recorder.events)
        for again in replay(self.header, events):
            assert snapshot(again) == self._snapshots[again.recorder.step]


def draw_all(plan: StepPlan, draw: Draw) -> list[list[SampledToken]]:
    """What everybody draws. A beam's token says, as a number, which beam has one more child instead."""
    tokens = {s: draw(s) for row in plan.rows for s in row.samples}
    parents: dict[Sequence, int] = {}
    for request in {row.sequence.request for row in plan.rows if row.sequence.request.beams}:
        beams = [row.sequence for row in plan.rows if row.sequence.request is request and row.samples]
        if request.forked and beams:
            slots = [s.index for s in beams]
            wanted = [slots[tokens[s] % len(slots)] for s in beams]
            children = zip(assign_slots(wanted, slots), wanted, strict=True)
            parents |= {request.sequences[slot]: parent for slot, parent in children if slot != parent}
    return [[SampledToken(tokens[s], parent=parents.get(s)) for s in row.samples] for row in plan.rows if row.samples]


class Tenure:
    """What a request ran between its admission and its end, to be compared with what it had to run."""

    def __init__(self, live: list[Sequence], hit: int) -> None:
        self.live, self.hit, self.ran, self.wasted = live, hit, 0, 0

    def check(self, request: Request) -> None:
        """The prompt once, less what was cached, and each sequence's tokens; its last only if the next step was planned."""
        if any(s.finish_reason is FinishReason.ABORT for s in request.sequences):
            return
        outputs = sum(len(s.output_token_ids) - 1 for s in self.live)
        needed = len(request.prompt_token_ids) - self.hit + outputs
        assert self.ran == needed + self.wasted, f"{request.id} ran {self.ran} tokens"


def snapshot(scheduler: Scheduler) -> object:
    """All that a scheduler's next decision depends on, as plain values."""
    kv = scheduler.kv
    requests = [*scheduler.running, *scheduler.waiting]
    return (
        [r.id for r in scheduler.running],
        [(r.id, r.status, r.forked) for r in requests],
        [(s.uid, s.num_computed, s.num_placeholders, tuple(s.output_token_ids)) for r in requests for s in r.sequences],
        (list(scheduler.in_flight.plans), list(scheduler.in_flight.leaving)),
        [(b.ref_count, b.hash) for b in kv.pool.blocks],
        [b.id for b in kv.pool.free_list],
        {key: list(copies) for key, copies in kv.pool.published.items()},
        [(table.ids, table.num_published) for table in kv.all_tables()],
        [(key, slot.id, slot.ready, slot.pins) for key, slot in scheduler.offload.tier.slots.items()],
    )

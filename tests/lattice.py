"""The lattice: one workload under every configuration must give the same tokens, and each cell must prove its point.

A cell is a configuration. `refused` says which cells the engine itself turns down; `run` drives a cell with any executor
of step plans; `prove` reads from the trace that what the cell is about (preemption, hits, chunks, forks) really happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from random import Random

from minivllm.config import EngineConfig, Policy
from minivllm.kv.hybrid import ONE_GROUP, Windows, make_manager, request_blocks
from minivllm.plan import EventKind, StepPlan, TraceEvent
from minivllm.request import Request, SampledToken, SamplingParams
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import Recorder

Execute = Callable[[StepPlan], list[list[SampledToken]]]
Tokens = dict[tuple[str, int], list[int]]
"""(request id, sequence index) -> what it said."""

LENGTHS = (6, 12, 48)
BLOCK_SIZES = (1, 4, 16)
BUDGETS = (1, 7, 64)
AT_ONCE = 4
"""Requests of a mixed batch that are there from the start; the others come one a step."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration. `tight`: the smallest pool that is accepted, else one that holds everybody. `mixed`: all
    requests together, else one after the other over the same cache."""

    max_model_len: int
    block_size: int
    budget: int
    caching: bool
    tight: bool
    mixed: bool
    chunked: bool
    policy: Policy

    def __str__(self) -> str:
        flags = [
            "cache" if self.caching else "nocache",
            "tight" if self.tight else "roomy",
            "mixed" if self.mixed else "alone",
            "chunked" if self.chunked else "whole",
            self.policy,
        ]
        return f"len{self.max_model_len}-block{self.block_size}-budget{self.budget}-{'-'.join(flags)}"

    @property
    def groups(self) -> Windows:
        """The window of each layer group of the model that the cell runs."""
        return ONE_GROUP

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            block_size=self.block_size,
            max_num_batched_tokens=self.budget,
            enable_prefix_caching=self.caching,
            enable_chunked_prefill=self.chunked,
            policy=self.policy,
            check_integrity=True,
        )


def cells() -> Iterator[Cell]:
    """Every combination, also those that the engine refuses."""
    both = (True, False)
    for values in product(LENGTHS, BLOCK_SIZES, BUDGETS, both, both, both, both, ("fcfs", "priority")):
        yield Cell(*values)


def refused(cell: Cell) -> bool:
    """Without chunking a step must have room for the longest prompt there can be."""
    return not cell.chunked and cell.budget < cell.max_model_len


def workload(max_model_len: int, vocab_size: int, eos: int) -> list[Request]:
    """Six requests: a common prefix, a prompt asked twice, forks, the longest there can be, and the shortest.

    `common` tokens are shared by the first three and the last; one request of two answers and one that ignores the end
    run their full length, so that forks are written to and the pool does fill up.
    """
    random = Random(max_model_len)

    def some(n: int) -> list[int]:
        return [random.choice([t for t in range(vocab_size) if t != eos]) for _ in range(n)]

    common = max_model_len * 5 // 8 - max_model_len // 12
    shared, asked_twice, longest = some(common), some(1), some(max_model_len * 3 // 4)
    left = max_model_len - common - 1
    full = SamplingParams(ignore_eos=True)
    return [
        Request("first", shared + asked_twice, full, max_tokens=left, priority=2),
        Request("second", shared + some(1), SamplingParams(), max_tokens=left, priority=0),
        Request("forked", shared[:-1], SamplingParams(n=2, ignore_eos=True), max_tokens=left, priority=1),
        Request("longest", longest, full, max_tokens=max_model_len - len(longest), priority=1),
        Request("shortest", some(1), SamplingParams(), max_tokens=max_model_len - 1, priority=2),
        Request("again", shared + asked_twice, full, max_tokens=left, priority=0),
    ]


def num_blocks(cell: Cell, requests: list[Request]) -> int:
    """Blocks of the pool, the null block included."""
    kv = make_manager(cell.config, 2, cell.groups)
    needs = [kv.blocks_of_request(r, [len(r.prompt_token_ids) + r.max_tokens - 1] * len(r.sequences)) for r in requests]
    return 1 + (max(*needs, request_blocks(cell.max_model_len, cell.groups, cell.config)) if cell.tight else sum(needs))


def make_scheduler(cell: Cell, requests: list[Request], eos: int) -> Scheduler:
    size = num_blocks(cell, requests), cell.max_model_len
    return Scheduler(cell.config, *size, (eos,), Recorder(keep=None), cell.groups)


@dataclass
class Device:
    """Runs plans in order, each as early or as late as a real one may: every other as soon as it is planned, before the
    scheduler has the tokens it needs; the rest when they are waited for, after the next one was planned."""

    execute: Execute
    queue: list[StepPlan] = field(default_factory=list)
    drawn: dict[int, list[list[SampledToken]]] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> None:
        self.queue.append(plan)
        if plan.step % 2:
            self._catch_up()

    def wait(self, plan: StepPlan) -> list[list[SampledToken]]:
        if plan.step not in self.drawn:
            self._catch_up()
        return self.drawn.pop(plan.step)

    def _catch_up(self) -> None:
        for plan in self.queue:
            self.drawn[plan.step] = self.execute(plan)
            for row, tokens in zip([row for row in plan.rows if row.samples], self.drawn[plan.step], strict=True):
                for sequence, token in zip(row.samples, tokens, strict=False):
                    sequence.last_drawn = token.token_id
        self.queue.clear()


def propose_nothing(scheduler: Scheduler) -> None:
    """Nobody speculates."""


def run(
    cell: Cell,
    scheduler: Scheduler,
    requests: list[Request],
    execute: Execute,
    limit: int = 2000,
    propose: Callable[[Scheduler], None] = propose_nothing,
) -> Tokens:
    """Drive the scheduler until all requests are done; `execute` runs a plan and draws, `propose` guesses before each."""
    coming, device, flying = list(requests), Device(execute), list[StepPlan]()
    while coming or scheduler.has_requests or flying:
        limit -= 1
        assert limit, "the cell doesn't come to an end"
        at_once = AT_ONCE if cell.mixed and len(coming) == len(requests) else 1
        if cell.mixed or not scheduler.has_requests:
            for request in coming[:at_once]:
                scheduler.add(request)
            del coming[:at_once]
        propose(scheduler)
        plan = scheduler.schedule()
        if plan.rows:
            device.launch(plan)
            flying.append(plan)
        while flying and (flying[0] is not plan or plan.awaited):
            scheduler.update(flying[0], device.wait(flying.pop(0)))
        scheduler.integrity()
    return {(r.id, s.index): s.output_token_ids for r in requests for s in r.sequences}


# proofs: what a cell's trace must show


def prove(cell: Cell, requests: list[Request], events: list[TraceEvent]) -> None:
    """Raise `AssertionError` unless the cell exercised what it stands for."""
    prove_batch(cell, requests, events)
    prove_memory(cell, events)
    prove_cache(cell, requests, events)
    prove_chunks(cell, requests, events)
    prove_forks(cell, requests, events)


def prove_batch(cell: Cell, requests: list[Request], events: list[TraceEvent]) -> None:
    together: dict[int, set[str]] = {}
    for event in of(events, EventKind.SCHEDULED):
        together.setdefault(event.step, set()).add(event.request)
    order = list(dict.fromkeys(event.request for event in of(events, EventKind.SCHEDULED)))
    in_turn = order == [r.id for r in requests]
    assert in_turn == (cell.policy == "fcfs" or not cell.mixed), "the policy didn't decide who goes first"
    shared_steps = any(len(names) > 1 for names in together.values())
    # with a budget of one token nobody is admitted beside a running request, unless it has just taken its last step
    assert shared_steps == (cell.mixed and cell.budget > 1), "requests didn't meet"


def can_preempt(cell: Cell) -> bool:
    """Whether requests that run together outgrow the pool: it takes a tight one, and a budget for more than one of them."""
    return cell.tight and cell.mixed and cell.budget > 1


def prove_memory(cell: Cell, events: list[TraceEvent]) -> None:
    assert bool(of(events, EventKind.PREEMPTED)) == can_preempt(cell), "preemptions"
    evicted = bool(of(events, EventKind.EVICTED))
    assert not (evicted and not cell.caching), "evicted what can't be cached"
    assert evicted or not (cell.caching and cell.tight and cell.block_size < cell.max_model_len), (
        "the pool never filled"
    )


def prove_cache(cell: Cell, requests: list[Request], events: list[TraceEvent]) -> None:
    """The prompt that is asked twice hits, if it has a full block before its last token."""
    hits = of(events, EventKind.HIT)
    can_hit = cell.caching and len(requests[0].prompt_token_ids) > cell.block_size
    assert bool(hits) == can_hit, "prefix-cache hits"
    assert cell.caching or not of(events, EventKind.PUBLISHED)


def prove_chunks(cell: Cell, requests: list[Request], events: list[TraceEvent]) -> None:
    prompts = {r.id: len(r.prompt_token_ids) for r in requests}
    chunks = [e for e in of(events, EventKind.SCHEDULED) if e.start + e.tokens < prompts[e.request]]
    assert cell.chunked or not chunks, "a prompt was split"
    assert chunks or not (cell.chunked and cell.budget < max(prompts.values())), "no prompt was split"


def prove_forks(cell: Cell, requests: list[Request], events: list[TraceEvent]) -> None:
    forked = {r.id: len(r.prompt_token_ids) for r in requests if len(r.sequences) > 1}
    assert {e.request for e in of(events, EventKind.FORKED)} == set(forked)
    copied = {e.request for e in of(events, EventKind.COPIED)}
    assert copied == {id for id, prompt in forked.items() if prompt % cell.block_size}, "copies on write"


def of(events: list[TraceEvent], kind: EventKind) -> list[TraceEvent]:
    return [event for event in events if event.kind is kind]

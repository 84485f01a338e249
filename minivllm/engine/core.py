"""The loop: `EngineCore.step` is one engine step, in the order in which things really happen.

The leading engine (vLLM 0.32, `v1/engine/core.py:EngineCore.step`) has the same order, with a process boundary around it.
Here everything lives in one process, behind one lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from minivllm.engine.grammars import Grammars
from minivllm.engine.outputs import OutputProcessor, Sink
from minivllm.plan import StepPlan
from minivllm.request import Request, SampledToken, Sequence, TokenLogprob
from minivllm.sched.scheduler import Scheduler

GRAMMAR_WAIT = 0.02


class StepResult(Protocol):
    """What a forward gives: `logits` float32 [R, V], one row for each plan row with samples, and the logits of prompt
    positions, float32 [num_tokens, V] for each plan row (by its index) whose request asked for prompt logprobs."""

    @property
    def logits(self) -> Tensor: ...

    @property
    def prompt_logits(self) -> dict[int, Tensor]: ...


class Runner(Protocol):
    """Runs a plan: block copies, then all K/V writes, then attention. `ModelRunner`, or a stand-in without a model."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class TokenSampler(Protocol):
    """Draws tokens: `Sampler`, with `BeamSampler` around it."""

    def sample(self, logits: Tensor, groups: list[tuple[Sequence, ...]]) -> list[list[SampledToken]]: ...


class EngineCore:
    """Scheduler, runner, sampler and output processor, stepped by whoever holds the lock.

    `add`, `abort` and `step` may be called from any thread; a step is never interrupted, so an abort takes effect
    between two steps. Outputs go to the sink that was given with the request, whoever steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: TokenSampler,
        outputs: OutputProcessor,
        grammars: Grammars,
        *,
        prompt_logprobs: Callable[[Tensor, list[int], int], list[TokenLogprob]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.outputs = outputs
        self.grammars = grammars
        self._prompt_logprobs = prompt_logprobs
        self._clock = clock
        self._lock = threading.Lock()

    def add(self, request: Request, sink: Sink, *, stream: bool = False) -> None:
        """Queue a request; `sink` gets its outputs: every step's with `stream`, else only the last.

        Raises `RequestError` if it can never run; nothing else is touched then.
        """
        with self._lock:
            request.arrival_time = self._clock()
            self.scheduler.add(request)
            self.outputs.register(request, sink, stream=stream)
            self.grammars.add(request)

    def abort(self, request_id: str) -> None:
        """End a request now, if it still runs, and free its blocks. Its sink hears nothing more."""
        with self._lock:
            self._drop(request_id)

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def step(self) -> int:
        """Run one step for everything that is scheduled; returns how many tokens were run (0 with nothing to do).

        A step that has to wait for a grammar, and for nothing else, sleeps a moment: callers may step in a loop.
        """
        with self._lock:
            num_tokens = self._step()
        if not num_tokens:
            self.grammars.wait(GRAMMAR_WAIT)
        return num_tokens

    def _step(self) -> int:
        if not self.scheduler.has_requests:
            return 0
        self._take_grammars()
        plan = self.scheduler.schedule()
        try:
            drawn = self._execute(plan)
        except BaseException:
            self._abandon(plan)
            raise
        appended = self.scheduler.update(plan, drawn)
        self.grammars.accept(appended)
        self.outputs.process(appended, self.scheduler, self._clock())
        if self.scheduler.config.check_integrity:
            self.scheduler.integrity()
        return plan.num_tokens

    def _take_grammars(self) -> None:
        """Let requests run whose grammar is compiled; one whose grammar failed is over, and hears why."""
        for request_id, error in self.grammars.take_compiled():
            if error is None:
                self.scheduler.grammar_compiled(request_id)
            else:
                self.outputs.fail(request_id, error)
                self.scheduler.abort(request_id)

    def _execute(self, plan: StepPlan) -> list[list[SampledToken]]:
        if not plan.rows:  # everything that could have run was preempted
            return []
        result = self.runner.execute(plan)
        for index, logits in result.prompt_logits.items():
            self._note_prompt_logprobs(plan.rows[index].sequence.request, plan.rows[index].start, logits)
        groups = [row.samples for row in plan.rows if row.samples]
        self.grammars.mask(result.logits, groups)  # filled while the forward runs, where a device runs it
        return self.sampler.sample(result.logits, groups)

    def _note_prompt_logprobs(self, request: Request, start: int, logits: Tensor) -> None:
        """Position p's logits speak of prompt token p + 1; the first token has none. A recomputed chunk adds nothing."""
        known, k = request.prompt_logprobs, request.params.prompt_logprobs
        if k is None:
            return
        known += [None] * (not known)
        first = len(known) - 1 - start
        following = request.prompt_token_ids[start + first + 1 : start + len(logits) + 1]
        if first >= 0 and following:
            known += self._prompt_logprobs(logits[first : first + len(following)], following, k)

    def _drop(self, request_id: str) -> None:
        self.outputs.forget(request_id)
        self.grammars.forget(request_id)
        self.scheduler.abort(request_id)

    def _abandon(self, plan: StepPlan) -> None:
        """The forward failed or was interrupted: what was planned has no KV. Drop every request, trust no hash."""
        self.scheduler.kv.release(plan.copies)
        for request_id in list(self.scheduler.requests):
            self._drop(request_id)
        self.scheduler.kv.reset_prefix_cache()

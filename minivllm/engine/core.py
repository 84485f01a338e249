"""The loop: `EngineCore.step` is one engine step, in the order in which things really happen.

The leading engine (vLLM 0.32, `v1/engine/core.py:EngineCore.step`) has the same order, with a process boundary around it.
Here everything lives in one process, behind one lock.

With `EngineConfig.async_depth=1` the model has a thread of its own, as on a GPU it has a stream (torch lets go of
Python's lock while it computes): forward n + 1 is launched before the tokens of step n have come, and runs while they
become text and step n + 2 is planned. What that asks of the scheduler: `sched/async_sched.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

from minivllm.engine.grammars import Grammars, Masks
from minivllm.engine.outputs import OutputProcessor, Sink
from minivllm.plan import StepPlan
from minivllm.request import Request, SampledToken, Sequence, TokenLogprob
from minivllm.runner.model_runner import StepResult
from minivllm.sample.grammar.mask import apply_masks
from minivllm.sched.scheduler import Scheduler

GRAMMAR_WAIT = 0.02


class Runner(Protocol):
    """Runs a plan: block copies in their order, then all K/V writes, then attention. `ModelRunner`, or a stand-in without a model."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class TokenSampler(Protocol):
    """Draws tokens: `Sampler`, with `BeamSampler` around it."""

    def sample(self, logits: Tensor, groups: list[tuple[Sequence, ...]]) -> list[list[SampledToken]]: ...


class Speculation(Protocol):
    """Guesses tokens, and says which guesses hold: see `sample/spec.py`."""

    def propose(self, sequence: Sequence) -> list[int]: ...

    def verify(self, logits: Tensor, plan: StepPlan, drawn: list[list[SampledToken]]) -> list[list[SampledToken]]: ...


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
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.outputs = outputs
        self.grammars = grammars
        self.speculation = speculation
        self._prompt_logprobs = prompt_logprobs
        self._clock = clock
        self._lock = threading.Lock()
        # Ctrl-C stops the main thread anywhere; a forward that other processes have a part in must run to its end.
        threaded = scheduler.config.async_depth or scheduler.config.tensor_parallel_size > 1
        self._worker: Executor = ThreadPoolExecutor(1, "worker") if threaded else Inline()
        self._launched: tuple[StepPlan, Future[list[list[SampledToken]]]] | None = None

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
        """Whether there is anything to step for: requests, or a step on its way whose requests have left."""
        return self.scheduler.has_requests or self._launched is not None

    def step(self) -> int:
        """Run one step for everything that is scheduled; returns how many tokens it runs (0 with nothing to do).

        A step that has to wait for a grammar, and for nothing else, sleeps a moment: callers may step in a loop.
        """
        with self._lock:
            num_tokens = self._step()
        if not num_tokens:
            self.grammars.wait(GRAMMAR_WAIT)
        return num_tokens

    def _step(self) -> int:
        if not self.has_requests:
            return 0
        self._take_grammars()
        try:
            num_tokens = self._advance()
        except BaseException:
            self._abandon()
            raise
        if self.scheduler.config.check_integrity:
            self.scheduler.integrity()
        return num_tokens

    def _advance(self) -> int:
        """Plan a step and launch it; then complete the one before, or this one too if it is awaited or nobody is left.

        The forward needs no more than the plan. Drawing waits until the tokens before are taken in: penalties, output
        positions and grammars look at them.
        """
        if self.speculation is not None:
            for sequence in self.scheduler.decoding():
                drafts = self.grammars.cut(sequence, self.speculation.propose(sequence))
                self.scheduler.propose(sequence, drafts)
        plan = self.scheduler.schedule()
        forward = self._worker.submit(self.runner.execute, plan) if plan.rows else None
        num_tokens = self._complete()
        if forward is not None:
            self._launched = plan, self._worker.submit(self._sample, plan, forward, self.grammars.masks(plan.groups))
        if plan.awaited or not self.scheduler.has_requests:
            num_tokens += self._complete()
        return plan.num_tokens or num_tokens

    def _complete(self) -> int:
        """Wait for the launched step, if there is one, and take in what it drew; returns how many tokens it ran."""
        if self._launched is None:
            return 0
        (plan, drawn), self._launched = self._launched, None
        appended = self.scheduler.update(plan, drawn.result())
        self.grammars.accept(appended)
        self.outputs.process(appended, self.scheduler, self._clock())
        return plan.num_tokens

    def _take_grammars(self) -> None:
        """Let requests run whose grammar is compiled; one whose grammar failed is over, and hears why."""
        for request_id, error in self.grammars.take_compiled():
            if error is None:
                self.scheduler.grammar_compiled(request_id)
            else:
                self.outputs.fail(request_id, error)
                self.scheduler.abort(request_id)

    def _sample(self, plan: StepPlan, forward: Future[StepResult], masks: Masks) -> list[list[SampledToken]]:
        """Where the model runs: from logits to tokens, which the next forward finds before anybody else hears of them."""
        result = forward.result()
        for index, logits in result.prompt_logits.items():
            self._note_prompt_logprobs(plan.rows[index].sequence.request, plan.rows[index].start, logits)
        if masks[0]:
            apply_masks(result.logits, *masks)  # filled while the forward ran
        drawn = self.sampler.sample(result.logits, plan.groups)
        if self.speculation is not None:
            return self.speculation.verify(result.logits, plan, drawn)
        for group, tokens in zip(plan.groups, drawn, strict=True):
            for sequence, token in zip(group, tokens, strict=True):
                sequence.last_drawn = token.token_id
        return drawn

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

    def _abandon(self) -> None:
        """A step failed or was interrupted: what was planned has no KV. Drop every request, trust no hash."""
        self._worker.submit(int).result()  # does nothing, after all that was submitted before
        self._launched = None
        for request_id in list(self.scheduler.requests):
            self._drop(request_id)
        for plan in list(self.scheduler.in_flight.plans.values()):
            self.scheduler.update(plan, [[] for _ in plan.groups])
        self.scheduler.kv.reset_prefix_cache()
        self.scheduler.offload.reset()


class Inline(Executor):
    """Runs what is submitted at once, in the thread that submits it: no step is on its way while another is planned."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future

"""Runs workloads and measures them. Time starts when the requests are handed over and ends with the last token."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from minivllm.bench import workloads
from minivllm.bench.first_token import measure_process
from minivllm.bench.workloads import Work
from minivllm.engine.core import EngineCore, Runner, StepResult, TokenSampler
from minivllm.llm import LLM
from minivllm.plan import StepPlan
from minivllm.request import RequestOutput, SampledToken, SamplingParams, Sequence

MODES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(slots=True)
class Stopwatch:
    """Wraps a runner and a sampler from outside and adds up the seconds spent in them."""

    runner: Runner
    sampler: TokenSampler
    seconds: float = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        result = self.runner.execute(plan)
        self.seconds += time.perf_counter() - start
        return result

    def sample(self, logits: Tensor, groups: list[tuple[Sequence, ...]]) -> list[list[SampledToken]]:
        start = time.perf_counter()
        drawn = self.sampler.sample(logits, groups)
        self.seconds += time.perf_counter() - start
        return drawn


@contextmanager
def stopwatch(core: EngineCore) -> Iterator[Stopwatch]:
    """Time the model and the sampler of an engine for a while; leaves the engine as it was."""
    watch = Stopwatch(core.runner, core.sampler)
    core.runner = core.sampler = watch
    try:
        yield watch
    finally:
        core.runner, core.sampler = watch.runner, watch.sampler


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds from handing the requests over to the first and to the last token, and how many tokens came.

    `bookkeeping` is the share (0 to 1) of the time that went into neither the model nor the sampler: scheduling,
    block tables, detokenising, outputs.
    """

    first: float
    last: float
    tokens: int
    bookkeeping: float


def run_work(llm: LLM, works: list[Work]) -> Run:
    """Hand all requests over at once and step until the last token is out."""
    core = llm.engine.core
    done: list[RequestOutput | Exception] = []
    requests = [llm.request(w.prompt, _exactly(w.new)) for w in works]
    with stopwatch(core) as watch:
        start = time.perf_counter()
        for request in requests:
            core.add(request, done.append)
        while core.has_requests:
            core.step()
        last = time.perf_counter() - start
    first = min(r.first_token_time or 0 for r in requests) - min(r.arrival_time for r in requests)
    tokens = sum(len(request.sequences[0].output_token_ids) for request in requests)
    return Run(first, last, tokens, 1 - watch.seconds / last)


def _exactly(new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Result:
    """One repetition: metrics by name, and the share of bookkeeping where it was measured."""

    metrics: dict[str, float]
    bookkeeping: float | None = None


def repetition(llm: LLM, workload: str, rep: int) -> Result:
    """Run one repetition of W1 to W4."""
    if workload == "W1":
        run = run_work(llm, workloads.single_stream(rep))
        return Result(
            {"ttft_ms": run.first * 1e3, "decode_tok_s": (run.tokens - 1) / (run.last - run.first)}, run.bookkeeping
        )
    if workload == "W2":
        run = run_work(llm, workloads.ragged_batch(rep))
        return Result({"output_tok_s": run.tokens / run.last, "wall_s": run.last}, run.bookkeeping)
    if workload == "W3":
        cold, warm = (run_work(llm, workloads.shared_prefix(rep, round)) for round in (0, 1))
        return Result({"cold_s": cold.last, "warm_s": warm.last}, cold.bookkeeping)
    if workload == "W3-off":
        run = run_work(llm, workloads.shared_prefix(rep, 0))
        return Result({"off_s": run.last}, run.bookkeeping)
    run = run_work(llm, workloads.long_prefill(rep))
    return Result({"prompt_tok_s": workloads.W4_PROMPT / run.first}, run.bookkeeping)


def first_token(model: str | None, mode: str) -> Result:
    """W5: a fresh process from its start to the first byte of an answer, and the most memory it took."""
    command = [sys.executable, "-m", "minivllm", "generate", "--dtype", MODES[mode], "--max-tokens", "8"]
    command += ["--prompt", workloads.CHAT_PROMPT, *(("--model", model) if model else ())]
    return Result(measure_process(command))

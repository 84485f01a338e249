"""Runs workloads and measures them. Time starts when the requests are handed over and ends with the last token."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from minivllm.bench import workloads
from minivllm.bench.first_token import measure_process
from minivllm.bench.workloads import Work
from minivllm.engine.core import EngineCore, Runner, StepResult, TokenSampler
from minivllm.engine.grammars import compile_grammar
from minivllm.llm import LLM
from minivllm.obs.acceptance import Acceptance
from minivllm.plan import StepPlan
from minivllm.request import GuidedJson, Request, RequestOutput, SampledToken, SamplingParams, Sequence

MODES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(slots=True)
class Stopwatch:
    """Wraps a runner and a sampler from outside and adds up the seconds spent in them, and the forwards."""

    runner: Runner
    sampler: TokenSampler
    seconds: float = 0.0
    steps: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
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
class Bookkeeping:
    """Work that is neither the model's nor the sampler's: scheduling, block tables, detokenising, outputs.

    `exposed` is the share (0 to 1) of the time in which only that ran; `hidden` the share in which it ran beside the model,
    counted by the thread's own processor time. `step_ms` are the milliseconds of both together, a step.
    """

    exposed: float
    hidden: float
    step_ms: float


def bookkeeping(wall: float, busy: float, host: float, steps: int) -> Bookkeeping:
    """Split `host` seconds of bookkeeping in a run of `wall` seconds, in which the model was `busy` for so many."""
    exposed = wall - busy
    hidden = max(0.0, host - exposed)
    return Bookkeeping(exposed / wall, hidden / wall, (exposed + hidden) / steps * 1e3)


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds from handing the requests over to the first and to the last token, and how many tokens came."""

    first: float
    last: float
    tokens: int
    bookkeeping: Bookkeeping
    lengths: tuple[int, ...]


def run_work(llm: LLM, works: list[Work]) -> Run:
    """Run requests of exactly as many tokens as they shall have."""
    return run_requests(llm, [llm.request(w.prompt, _exactly(w.new)) for w in works])


def run_requests(llm: LLM, requests: list[Request]) -> Run:
    """Hand all requests over at once and step until the last token is out."""
    core = llm.engine.core
    done: list[RequestOutput | Exception] = []
    with stopwatch(core) as watch:
        start, start_here = time.perf_counter(), time.thread_time()
        for request in requests:
            core.add(request, done.append)
        while core.has_requests:
            core.step()
        last, here = time.perf_counter() - start, time.thread_time() - start_here
    host = here if core.scheduler.config.async_depth else 0.0  # else the model's time is in it
    first = min(r.first_token_time or 0 for r in requests) - min(r.arrival_time for r in requests)
    lengths = tuple(len(request.sequences[0].output_token_ids) for request in requests)
    return Run(first, last, sum(lengths), bookkeeping(last, watch.seconds, host, watch.steps), lengths)


def _exactly(new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Result:
    """One repetition: metrics by name; the bookkeeping, and what came of drafts, where they were measured."""

    metrics: dict[str, float]
    bookkeeping: Bookkeeping | None = None
    acceptance: Acceptance | None = None


def repetition(llm: LLM, workload: str, rep: int) -> Result:
    """Run one repetition of any workload but W5; with speculation, count its drafts."""
    if llm.engine.config.spec_method == "none":
        return run_workload(llm, workload, rep)
    before = drafts_so_far(llm)
    result = run_workload(llm, workload, rep)
    return replace(result, acceptance=drafts_so_far(llm) - before)


def drafts_so_far(llm: LLM) -> Acceptance:
    """A copy of what an engine has counted since it started."""
    scheduler = llm.engine.core.scheduler
    return Acceptance(Counter(scheduler.num_drafts), Counter(scheduler.num_accepted))


def run_workload(llm: LLM, workload: str, rep: int) -> Result:
    """Run and time one repetition of any workload but W5."""
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
    if workload == "W6":
        return json_cost(llm, rep)
    run = run_work(llm, workloads.long_prefill(rep))
    return Result({"prompt_tok_s": workloads.W4_PROMPT / run.first}, run.bookkeeping)


def json_cost(llm: LLM, rep: int) -> Result:
    """W6: with a JSON schema, and without it but cut at the same lengths; and what the schema costs before and in a step.

    `first_use_ms` is for the vocabulary's trie and the grammar, which requests wait for once; `row_us` for one new row of
    allowed tokens (mean over all states). In the warm-up the engine compiles the schema: later repetitions find it there.
    """
    guided = GuidedJson(workloads.W6_SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=workloads.W6_MAX_NEW, guided=guided)
    prompts = workloads.small_objects(rep)
    schema = run_requests(llm, [llm.request(prompt, params) for prompt in prompts])
    free = run_requests(llm, [llm.request(p, _exactly(new)) for p, new in zip(prompts, schema.lengths, strict=True)])
    start = time.perf_counter()
    grammar = compile_grammar(guided, llm.engine.core.grammars.make_vocabulary())
    compiled = time.perf_counter()
    for state in range(len(grammar.live)):
        grammar.row(state)
    metrics = {
        "schema_tok_s": schema.tokens / schema.last,
        "free_tok_s": free.tokens / free.last,
        "cost_pct": 100 * (1 - free.last / schema.last),
        "tokens": schema.tokens,
        "first_use_ms": (compiled - start) * 1e3,
        "row_us": (time.perf_counter() - compiled) / len(grammar.live) * 1e6,
    }
    return Result(metrics, schema.bookkeeping)


def first_token(model: str | None, mode: str) -> Result:
    """W5: a fresh process from its start to the first byte of an answer, and the most memory it took."""
    command = [sys.executable, "-m", "minivllm", "generate", "--dtype", MODES[mode], "--max-tokens", "8"]
    command += ["--prompt", workloads.CHAT_PROMPT, *(("--model", model) if model else ())]
    return Result(measure_process(command))

"""Drive the scheduler without a model: every decision about blocks and steps is the real one, only the tokens are made up.

And, where a model is wanted, run one model under several configurations without loading it again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from minivllm.config import EngineConfig
from minivllm.request import Request, SampledToken, SamplingParams, Sequence
from minivllm.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from minivllm.llm import LLM


def make_scheduler(num_blocks: int, max_model_len: int | None = None, **settings: object) -> Scheduler:
    """A scheduler over `num_blocks` blocks (the null block included); settings are those of `EngineConfig`.

    `max_model_len` defaults to what fits the blocks.
    """
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    return Scheduler(config, num_blocks, max_model_len or (num_blocks - 1) * config.block_size)


def ask(scheduler: Scheduler, name: str, prompt: Seq[int], max_tokens: int = 1, salt: str = "") -> Request:
    """Queue a request; it always draws `max_tokens` tokens."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    request = Request(name, list(prompt), params, max_tokens=max_tokens, cache_salt=salt)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> int:
    """Run one step; returns the number of tokens that a model would have run."""
    plan = scheduler.schedule()
    rows = [row for row in plan.rows if row.samples]
    scheduler.update(plan, [[SampledToken(draw(sequence)) for sequence in row.samples] for row in rows])
    return plan.num_tokens


def run(scheduler: Scheduler) -> int:
    """Step until nobody waits or runs; returns the number of tokens that a model would have run."""
    total = 0
    while scheduler.has_requests:
        total += step(scheduler)
    return total


def draw(sequence: Sequence) -> int:
    """The next token of a sequence: a number that depends on every token before it, so that answers to different
    prompts differ, and equal prompts get equal answers."""
    token = 0
    for known in sequence.tokens(0, sequence.num_tokens):
        token = (31 * token + known + 7) % 50_021
    return token


def same_model(llm: LLM, config: EngineConfig) -> LLM:
    """A new engine, with an empty cache and a trace of its own, around the model that `llm` has in memory."""
    from minivllm.engine.startup import build_engine  # imports torch, which driving a scheduler does without
    from minivllm.llm import LLM
    from minivllm.runner.model_runner import ModelRunner

    runner = llm.engine.core.runner
    assert isinstance(runner, ModelRunner)
    return LLM(engine=build_engine(runner.model, llm.tokenizer, config))

"""`generate`: one prompt or a file of them, as text or as JSON lines."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from minivllm.cli.answer import cost_of
from minivllm.cli.ask import chat_or_raw, stream_answer
from minivllm.cli.flags import SYSTEM, EngineFlags, SamplingFlags, System, with_flags
from minivllm.cli.guided import GuidedFlags
from minivllm.cli.start import progress, started
from minivllm.config import ConfigError, RequestError
from minivllm.request import BeamParams, CompletionOutput, Guided, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from minivllm.llm import LLM

SOME_FAILED = 1
Errors = Literal["raise", "return"]


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, or why its line is none. `source` says where it is from, for messages and JSON."""

    number: int
    source: str
    prompt: str
    error: RequestError | None = None


@with_flags
def generate(
    engine: EngineFlags,
    sampling: SamplingFlags,
    guided: GuidedFlags,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]", help="The prompt.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The same, where it starts with a dash.", show_default=False)
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts, one a line, in UTF-8; empty lines are left out.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Put each prompt into the model's chat template, or give it as it is.")
    ] = False,
    system: System = SYSTEM,
    n: Annotated[int, typer.Option("-n", "--n", help="Answers to each prompt.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="K", help="Log-probabilities of the chosen and the K likeliest tokens; needs --json."),
    ] = None,
    beams: Annotated[
        int | None, typer.Option(metavar="N", help="Search with N beams; answers come best first.", show_default=False)
    ] = None,
    length_penalty: Annotated[
        float, typer.Option(help="With --beams: the larger, the more it favours long answers.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each answer on stdout.")] = False,
) -> None:
    """Answer prompts, all in one continuous batch.

    A bad line of --prompts-file is told on stderr while the others run; the exit code is then 1. With --json each
    answer is an object with prompt (its number, or its line), index (0 to n - 1), text, token_ids, finish_reason, usage
    and metrics; a bad line is one with prompt and error. Answers of --beams have score and cumulative_logprob too.
    """
    if (words is not None) + (prompt is not None) + (prompts_file is not None) != 1:
        raise ConfigError("prompt", prompt, "give one of PROMPT, --prompt and --prompts-file")
    prompt = " ".join(words) if words else prompt
    if logprobs is not None and not as_json:
        raise ConfigError("logprobs", logprobs, "are only shown with --json")
    if beams is None and length_penalty != 1:
        raise ConfigError("length_penalty", length_penalty, "needs --beams")
    guide = guided.guided()
    params: SamplingParams | BeamParams = sampling.params(n=n, logprobs=logprobs, guided=guide)
    if beams is not None:
        params = beam_params(sampling, beams, length_penalty, n=n, logprobs=logprobs, guided=guide)
    jobs = [Job(1, "prompt", prompt)] if prompt is not None else read_prompts(prompts_file or Path())
    with started(engine.model, engine.config(), tell_memory=True) as llm:
        if chat:
            jobs = [replace(job, prompt=chat_or_raw(llm, job.prompt, system)) for job in jobs]
        if isinstance(params, SamplingParams) and prompt is not None and n == 1 and not as_json:
            stream_answer(llm, jobs[0].prompt, params)
        elif not run_jobs(llm, jobs, params, as_json=as_json, errors="raise" if prompt is not None else "return"):
            raise typer.Exit(SOME_FAILED)


def beam_params(
    sampling: SamplingFlags, width: int, length_penalty: float, *, n: int, logprobs: int | None, guided: Guided | None
) -> BeamParams:
    """The parameters of a beam search; raises `ConfigError` for flags that it could only ignore."""
    unused = {"n": (n, 1), "logprobs": (logprobs, None), "guided": (guided, None)}
    plain = SamplingFlags()
    unused |= {f: (getattr(sampling, f), getattr(plain, f)) for f in ("temperature", "top_p", "top_k", "min_p", "seed")}
    for name, (value, default) in {**unused, "stop": (sampling.stop or None, None)}.items():
        if value != default:
            raise ConfigError(name, value, "means nothing to --beams: leave one of them out")
    return BeamParams(width, sampling.max_tokens, length_penalty)


def read_prompts(path: Path) -> list[Job]:
    """A prompt for each line that isn't empty; a line that isn't UTF-8 becomes a job with an error.

    Raises `ConfigError` if the file can't be read or holds no prompt.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError("prompts_file", str(path), f"can't be read ({error.strerror})") from error
    jobs = [_read_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not jobs:
        raise ConfigError("prompts_file", str(path), "holds no prompt: write one a line")
    return jobs


def _read_line(path: Path, number: int, line: bytes) -> Job:
    source = f"{path}, line {number}"
    try:
        return Job(number, source, line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Job(number, source, "", RequestError("prompt", line[:20], f"is not UTF-8 ({error.reason})"))


def run_jobs(llm: LLM, jobs: list[Job], params: SamplingParams | BeamParams, *, as_json: bool, errors: Errors) -> bool:
    """Answer all jobs that have a prompt and write the answers in order; whether all of them were good."""
    good = [job for job in jobs if job.error is None]
    several = isinstance(params, BeamParams) or params.n > 1
    with progress("prompts", len(good)) as on_step:
        results = llm.generate([job.prompt for job in good], params, errors=errors, on_step=on_step)
    by_job = dict(zip((job.number for job in good), results, strict=True))
    outcomes = [(job, by_job.get(job.number) or job.error) for job in jobs]
    for job, outcome in outcomes:
        if isinstance(outcome, RequestOutput):
            write_output(llm, job, outcome, as_json=as_json, heading=len(jobs) > 1 or several)
        else:
            write_error(job, outcome, as_json=as_json)
    return all(isinstance(outcome, RequestOutput) for _, outcome in outcomes)


def write_output(llm: LLM, job: Job, output: RequestOutput, *, as_json: bool, heading: bool) -> None:
    """Write a prompt's n answers to stdout; as text, each under a heading if there are several."""
    for completion in output.outputs:
        if as_json:
            print(json.dumps(as_record(llm, job, output, completion), ensure_ascii=False, allow_nan=False))
            continue
        if heading:
            print(f"--- {job.source}" + (f", answer {completion.index + 1}" if len(output.outputs) > 1 else ""))
        print(completion.text)


def write_error(job: Job, error: RequestError | None, *, as_json: bool) -> None:
    """Tell about a bad line: on stderr, and with --json also in its place on stdout."""
    print(f"error: {job.source}: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"prompt": job.number, "error": str(error)}, ensure_ascii=False))


def as_record(llm: LLM, job: Job, output: RequestOutput, completion: CompletionOutput) -> dict[str, object]:
    """One answer as the JSON object that `--json` prints. Times in seconds; usage and metrics are the request's."""
    cost = cost_of(output, llm)
    record: dict[str, object] = {
        "prompt": job.number,
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": {
            "prompt_tokens": cost.prompt_tokens,
            "completion_tokens": cost.new_tokens,
            "cached_tokens": cost.cached_tokens,
        },
        "metrics": {
            "ttft": cost.ttft,
            "tokens_per_second": cost.tokens_per_second,
            "kv_blocks": cost.blocks,
            "kv_blocks_unshared": cost.unshared_blocks,
            "preemptions": output.metrics.num_preemptions,
        },
    }
    if completion.score is not None:
        record |= {"score": completion.score, "cumulative_logprob": completion.cumulative_logprob}
    if completion.logprobs is not None:
        record["logprobs"] = [asdict(logprob) for logprob in completion.logprobs]
    return record

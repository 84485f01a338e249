"""No command: a chat on a terminal, or one answer to a prompt given as argument or piped in."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from minivllm.cli.answer import Answer, cost_of
from minivllm.cli.flags import SYSTEM, EngineFlags, SamplingFlags, System, with_flags
from minivllm.cli.start import started
from minivllm.config import RequestError

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.request import SamplingParams


@with_flags
def ask(
    engine: EngineFlags,
    sampling: SamplingFlags,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]", help="What to ask; else it is read from standard input.", show_default=False
        ),
    ] = None,
    system: System = SYSTEM,
) -> None:
    """One answer to PROMPT, or to standard input; on a terminal without PROMPT, a chat."""
    if not prompt and sys.stdin.isatty():
        from minivllm.cli.chat import talk

        talk(engine, sampling, system)
        return
    params = sampling.params()
    text = " ".join(prompt) if prompt else read_stdin()
    with started(engine.model, engine.config()) as llm:
        stream_answer(llm, chat_or_raw(llm, text, system), params)


def read_stdin() -> str:
    """Standard input as text. Raises `RequestError` if it is empty or not UTF-8."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise RequestError("prompt", "standard input", f"is not UTF-8 ({error})") from error
    if not text:
        raise RequestError(
            "prompt", text, 'is empty: pipe some text in, or give it as argument: python -m minivllm "What is ...?"'
        )
    return text


def chat_or_raw(llm: LLM, text: str, system: str) -> str:
    """The prompt that the model's chat template makes of one question; the text itself for a model without one."""
    if llm.tokenizer.chat_template is None:
        return text
    return llm.chat_prompt([{"role": "system", "content": system}, {"role": "user", "content": text}])


def stream_answer(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Write one answer to stdout as it comes, and what it cost to stderr, in one line."""
    answer = Answer(llm, prompt, params)
    for output in answer:
        sys.stdout.write(output.outputs[0].delta)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    assert answer.last is not None
    print(cost_of(answer.last, llm), file=sys.stderr)

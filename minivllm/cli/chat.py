"""`chat`: a conversation on the terminal, with a look inside the engine between two answers."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

from minivllm.cli.answer import Answer, cost_of
from minivllm.cli.cache_view import state_of
from minivllm.cli.flags import SYSTEM, EngineFlags, SamplingFlags, System, with_flags
from minivllm.cli.start import started
from minivllm.cli.trace_view import draw_block_tables, draw_pool, draw_timeline, steps_that_fit, tell_events
from minivllm.config import RequestError
from minivllm.obs.acceptance import Acceptance
from minivllm.obs.timeline import build_timeline
from minivllm.request import SamplingParams

if TYPE_CHECKING:
    from minivllm.llm import LLM

HELP = """[bold]/stats[/bold]  what the scheduler and the KV cache hold, and the last answer's block table
[bold]/trace[/bold]  the last steps, drawn
[bold]/reset[/bold]  forget the conversation (its blocks stay in the prefix cache)
[bold]/help[/bold]   this
[bold]/exit[/bold]   leave; Ctrl-D too. Ctrl-C stops an answer."""
PROMPT = "\n\001\033[1;36m\002>\001\033[0m\002 "  # readline must not count what is between \001 and \002
CHAT_TEMPERATURE, CHAT_TOP_P = 0.2, 0.9  # what the default model's makers advise


@with_flags
def chat(
    engine: EngineFlags,
    sampling: SamplingFlags,
    system: System = SYSTEM,
) -> None:
    """Chat with a model: answers stream, /stats and /trace show the engine at work.

    Without --temperature and --top-p it samples a little (0.2, 0.9): small models repeat themselves when greedy. For greedy
    answers say --temperature 0.
    """
    talk(engine, sampling, system)


def talk(engine: EngineFlags, sampling: SamplingFlags, system: str) -> None:
    """Start the engine and hold a conversation until the user leaves."""
    params = sampling.with_defaults(temperature=CHAT_TEMPERATURE, top_p=CHAT_TOP_P).params()
    console = Console(highlight=False)
    with started(engine.model, engine.config()) as llm:
        greet(console, llm, engine.model)
        Chat(llm, params, console, system).run()


def greet(console: Console, llm: LLM, model: str | None) -> None:
    """Say what runs, and how much of it fits in the KV cache."""
    from minivllm.models.fetch import resolve_model
    from minivllm.runner.model_runner import pick_dtype

    dtype = str(pick_dtype(llm.engine.config)).removeprefix("torch.")
    console.print(f"[bold]minivllm[/bold] · {escape(resolve_model(model).name)} · {dtype}")
    for line in (llm.engine.phases, llm.engine.kv_memory, "Type a message, or /help."):
        console.print(str(line), style="dim", markup=False)


class Chat:
    """One conversation. `messages` is its history, `answer` the last answer with what it held."""

    def __init__(self, llm: LLM, params: SamplingParams, console: Console, system: str) -> None:
        self.llm = llm
        self.params = params
        self.console = console
        self.start = [{"role": "system", "content": system}]
        self.messages = list(self.start)
        self.answer: Answer | None = None
        self.commands: dict[str, Callable[[], None]] = {
            "/stats": self.show_stats,
            "/trace": self.show_trace,
            "/reset": self.reset,
            "/help": lambda: console.print(HELP),
        }

    def run(self) -> None:
        """Read a line, do what it says, until /exit or end of input."""
        for line in read_lines(self.console):
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self.commands.get(line, lambda: self.console.print("No such command.\n" + HELP))()
            else:
                self.reply(line)

    def reset(self) -> None:
        """Forget the conversation; the engine keeps its prefix cache."""
        self.messages = list(self.start)
        self.console.print("[dim]Forgotten.[/dim]")

    def reply(self, text: str) -> None:
        """Answer a message, streaming. Ctrl-C ends the answer; what was said so far stays in the history."""
        self.messages.append({"role": "user", "content": text})
        try:
            with ctrl_c_as_flag() as stopped, no_echo():
                answer = Answer(self.llm, self.fitting_prompt(), self.params, stopped)
                said = self._stream(answer)
        except RequestError as error:
            self.messages.pop()
            self.console.print(f"[red]{escape(str(error))}[/red]")
            return
        self.answer = answer
        self.messages.append({"role": "assistant", "content": said})
        if answer.last is not None:
            how = " · [yellow]stopped[/yellow]" if not answer.last.finished else ""
            self.console.print(f"[dim]{cost_of(answer.last, self.llm)}[/dim]{how}")

    def _stream(self, answer: Answer) -> str:
        wrap = WordWrap(self.console.width)
        said = ""
        for output in answer:
            said += output.outputs[0].delta
            self._write(wrap.feed(output.outputs[0].delta))
        self._write(wrap.finish() + "\n")
        return said.strip()

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()

    def fitting_prompt(self) -> str:
        """The conversation as a prompt. If it fills more than half the context, the oldest exchanges are forgotten."""
        encode, room = self.llm.tokenizer.encode, self.llm.engine.kv_memory.max_model_len // 2
        prompt, oldest = self.llm.chat_prompt(self.messages), len(self.start)
        while len(self.messages) > oldest + 1 and len(encode(prompt)) > room:
            del self.messages[oldest : oldest + 2]
            prompt = self.llm.chat_prompt(self.messages)
            self.console.print("[dim](the conversation got long: its oldest question and answer are forgotten)[/dim]")
        return prompt

    def show_stats(self) -> None:
        """Scheduler, KV cache and prefix cache in numbers; then the last answer's block table."""
        scheduler = self.llm.engine.core.scheduler
        state, stats = state_of(scheduler), scheduler.kv.stats
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_row("scheduler", f"step {scheduler.recorder.step:,} · {state.running} running · {state.waiting} waiting"
                                   f" · {scheduler.num_preemptions} preempted so far")  # fmt: skip
        grid.add_row("attention", escape(str(self.llm.engine.backend)))
        grid.add_row("KV blocks", draw_pool(state, self.console.width - 52))
        grid.add_row("prefix cache", f"{stats.hits:,} of {stats.queries:,} prompt tokens found ({stats.hit_rate:.0%})")
        if scheduler.config.spec_method != "none":
            grid.add_row("speculation", str(Acceptance(scheduler.num_drafts, scheduler.num_accepted)))
        moved = scheduler.offload.stats
        if scheduler.config.host_kv_blocks:
            size = self.llm.engine.kv_memory.block_bytes
            grid.add_row("host memory", f"{moved.hits:,} tokens found · {moved.stored * size:,} bytes out, {moved.loaded * size:,} back"
                                         f" · {moved.swaps} swapped, {scheduler.in_flight.num_recomputed:,} tokens computed again")  # fmt: skip
        self.console.print(grid)
        if self.answer is not None and self.answer.tables:
            blocks = [scheduler.kv.pool.blocks[b.id] for table in self.answer.tables for b in table.blocks]
            kept = sum(block.hash is not None for block in blocks)
            title = f"the last answer's block table, {kept} of {len(blocks)} blocks still cached"
            self.console.print(Rule(title, style="dim"))
            self.console.print(draw_block_tables(self.answer.tables, scheduler.kv.block_size))

    def show_trace(self) -> None:
        """The last steps as a timeline, and what was decided in them."""
        events = list(self.llm.engine.core.scheduler.recorder.events)
        timeline = build_timeline(events)
        if not timeline.last:
            self.console.print("[dim]No step has run yet.[/dim]")
            return
        width = self.console.width
        first = max(timeline.first, timeline.last - steps_that_fit(timeline, width) + 1)
        budget = self.llm.engine.config.max_num_batched_tokens
        self.console.print(draw_timeline(timeline, first, timeline.last, budget, width))
        told = tell_events(event for event in events if event.step >= first)
        self.console.print("\n".join(told), markup=False, soft_wrap=True)


class WordWrap:
    """Breaks streamed text between words, so that a terminal need not break inside them."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> str:
        """What can be shown now: all but the last, perhaps unfinished, word."""
        return "".join(self._put(character) for character in text)

    def finish(self) -> str:
        """The last word."""
        return self._put(" ").removesuffix(" ")

    def _put(self, character: str) -> str:
        if not character.isspace():
            self._word += character
            return ""
        word, self._word = self._word, ""
        line_break = ""
        if word and self._column + len(word) > self.width and self._column:
            line_break, self._column = "\n", 0
        self._column = 0 if character == "\n" else self._column + len(word) + 1
        return line_break + word + character


def read_lines(console: Console) -> Iterator[str]:
    """Lines that the user types, without blanks around them, until Ctrl-D. Ctrl-C discards the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and history
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim](/exit or Ctrl-D leaves)[/dim]")
            continue
        if line:
            yield line


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Don't show what is typed while an answer streams; it is kept for the next prompt. Does nothing without a terminal."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextlib.contextmanager
def ctrl_c_as_flag() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag that is looked at between steps, so that no step is torn apart."""
    pressed = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)

"""Puts the commands together. Each imports what it needs when it runs, so that `--help` and `trace` start at once."""

from __future__ import annotations

import inspect
import os
import sys
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from minivllm import __version__
from minivllm.cli.ask import ask
from minivllm.cli.bench import bench
from minivllm.cli.chat import chat
from minivllm.cli.course import PASS_THROUGH, grade, interview
from minivllm.cli.doctor import doctor
from minivllm.cli.generate import generate
from minivllm.cli.plan import plan
from minivllm.cli.trace import trace
from minivllm.config import ConfigError, MinivllmError

BAD_INPUT = 2
NUMBERS = {int: "must be a whole number, in digits", float: "must be a number, such as 0.5"}
HELP = """An LLM inference engine small enough to read in a weekend.

Without a command: a chat on a terminal; one answer for a prompt given as argument (python -m minivllm "What is ...?")
or on standard input.
"""


class Commands(TyperGroup):
    """The commands, with two additions: no command means `ask`, and a user's error is one line and exit code 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in ("--help", "--version") and not self._meant(args)):
            args = ["ask", *args]
        return super().parse_args(ctx, args)

    def _meant(self, args: list[str]) -> bool:
        """Whether the first word is a command, or one word that was probably meant to be one."""
        first = args[0]
        return first in self.commands or (len(args) == 1 and bool(get_close_matches(first, self.commands, cutoff=0.7)))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MinivllmError as error:
            fail(error)
        except BrokenPipeError:  # whoever read our output has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None


class Command(TyperCommand):
    """A command whose flags refuse what is no number like any other bad value: flag, value and fix in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # the parser uses them up
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            values, flag = self.make_parser(ctx).parse_args(words)[0], error.param
            if flag is not None and flag.name in values and (fix := self._number(flag.name)):
                raise ConfigError(max(flag.opts, key=len), values[flag.name], fix) from error
            raise

    def _number(self, name: str) -> str | None:
        """What the value of a flag must be, if it is a number."""
        assert self.callback is not None
        command = inspect.unwrap(self.callback, stop=lambda f: hasattr(f, "__signature__"))  # as `with_flags` left it
        hint = get_type_hints(command)[name]
        return next((fix for kind, fix in NUMBERS.items() if kind in (hint, *get_args(hint))), None)


def fail(error: Exception) -> None:
    """Say what is wrong in one line on stderr, and leave."""
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    raise typer.Exit(BAD_INPUT) from error


def _version(wanted: bool) -> None:
    if wanted:
        print(f"minivllm {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands, help=HELP, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version.")
    ] = False,
) -> None:
    """The group itself does nothing."""


app.command(hidden=True, cls=Command)(ask)
for command in (chat, generate, bench, trace, plan, doctor):
    app.command(cls=Command)(command)
for command in (grade, interview):
    app.command(context_settings=PASS_THROUGH)(command)
root.__doc__ = HELP

"""The command line: `python -m minivllm`. One module a command; `app.py` puts them together."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process; the exit code is 0, 1 (something in it failed) or 2 (bad input)."""
    if any(argument.partition("=")[0] == "--with" for argument in sys.argv):
        take_answers()
    from minivllm.cli.app import app

    app()


def take_answers() -> None:
    """Put the files named by `--with` into the engine, which nothing may have imported yet, and go on without the flag."""
    from minivllm.course.run import put_in, split_arguments

    paths, sys.argv[1:] = split_arguments(sys.argv[1:])
    put_in(paths)

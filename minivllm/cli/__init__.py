"""The command line: `python -m minivllm`. One module a command; `app.py` puts them together."""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process; the exit code is 0, 1 (something in it failed) or 2 (bad input)."""
    from minivllm.cli.app import app

    app()

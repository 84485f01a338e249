"""`grade` and `interview`: the course's own commands, which read their arguments themselves."""

from __future__ import annotations

import typer

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def grade(context: typer.Context) -> None:
    """Grade your answers to exercises: grade kv-01. See grade --help."""
    from minivllm.course.grade import main

    raise typer.Exit(main(context.args))


def interview(context: typer.Context) -> None:
    """Practise interview questions. See interview --help."""
    from minivllm.course.interview import main

    raise typer.Exit(main(context.args))

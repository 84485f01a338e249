"""Run the engine with a student's functions inside: `python -m minivllm.course.run --with PATH ... ARGUMENTS`.

The same as `python -m minivllm ARGUMENTS --with PATH ...`. `--with` takes a file or a folder, and may be repeated.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from minivllm.course import splice
from minivllm.course.manifest import CourseError


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The paths of all `--with`, and the other arguments in their order. Exits with status 2 if one has no path."""
    parser = argparse.ArgumentParser(prog="minivllm", add_help=False, allow_abbrev=False)
    parser.add_argument("--with", dest="paths", action="append", type=Path, default=[], metavar="PATH")
    options, rest = parser.parse_known_args(list(arguments))
    return options.paths, rest


def put_in(paths: Sequence[Path]) -> None:
    """Put answers into the engine and say on stderr which. Exits with status 2 if that can't be done."""
    try:
        files = splice.install(paths)
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"running with {', '.join(file.stem for file in files) or 'nothing: only untouched stubs'}", file=sys.stderr)


def main() -> None:
    """What `python -m minivllm` does; without a `--with` a usage error."""
    if not split_arguments(sys.argv[1:])[0]:
        sys.exit((__doc__ or "").split("\n")[0])
    runpy.run_module("minivllm", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

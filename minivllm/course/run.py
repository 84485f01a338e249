"""Run the engine with a student's functions inside: `python -m minivllm.course.run --with PATH ... -- ARGUMENTS`.

The arguments are those of `python -m minivllm`. `--with` takes a file or a folder, and may be repeated.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from minivllm.course import splice
from minivllm.course.manifest import CourseError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minivllm.course.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--with", dest="paths", action="append", type=Path, required=True, metavar="PATH")
    parser.add_argument("arguments", nargs="*", help="arguments of python -m minivllm, after --")
    options = parser.parse_args(argv)
    try:
        files = splice.install(options.paths)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"running with {', '.join(file.stem for file in files) or 'nothing: only untouched stubs'}", file=sys.stderr)
    sys.argv = ["minivllm", *options.arguments]
    runpy.run_module("minivllm", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

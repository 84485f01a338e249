"""How much code there is to read: the table behind the promise "small enough to read in a weekend".

    python -m minivllm.course.size

A code line is a line that holds at least one token other than a comment or a docstring. Counting tokens and not text
leaves nothing to gain from formatting tricks (tinygrad's `sz.py` has the same idea).
"""

from __future__ import annotations

import ast
import io
import math
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = ("engine", "sched", "kv", "runner", "models", "sample", "config", "request", "llm")
MAX_ENGINE_LINES = 5_600
MAX_LINES = 11_000  # of all but the course machine: book/decisions/0005
MAX_COURSE_LINES = 4_500
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_FUNCTION_MEDIAN = 8
MAX_FUNCTION_P90 = 25

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class FileSize:
    """Code lines of one file, and of each of its functions by `path:line name`. `path` is relative to the package."""

    path: Path
    lines: int
    functions: dict[str, int]

    @property
    def package(self) -> str:
        """The folder below minivllm/ that the file is in, or its own name without the suffix."""
        return self.path.parts[0].removesuffix(".py")


def code_lines(source: str) -> set[int]:
    """Numbers (from 1) of the lines of Python source that hold code. Raises `SyntaxError` for what isn't Python."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - set(_docstring_lines(ast.parse(source)))


def _docstring_lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def measure(path: Path, root: Path = ROOT) -> FileSize:
    """Count one file; a function's lines include its signature and the functions inside it."""
    source = path.read_text(encoding="utf-8")
    lines, short = code_lines(source), path.relative_to(root)
    functions = {
        f"{short}:{node.lineno} {node.name}": len(lines & set(range(node.lineno, (node.end_lineno or 0) + 1)))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return FileSize(short, len(lines), functions)


def measure_all(root: Path = ROOT) -> list[FileSize]:
    """Every Python file of a package, in order of path."""
    return [measure(path, root) for path in sorted(root.rglob("*.py"))]


def percentile(values: Iterable[int], share: float) -> int:
    """The smallest value that at least `share` (0 to 1) of all values don't exceed; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * share), 1) - 1] if ordered else 0


def over_limits(files: list[FileSize]) -> list[str]:
    """One sentence for each ceiling that is broken; empty when all hold."""
    functions = {name: n for file in files for name, n in file.functions.items()}
    engine = sum(file.lines for file in files if file.package in ENGINE)
    checks = [
        ("engine proper", engine, MAX_ENGINE_LINES),
        ("minivllm without course", sum(file.lines for file in files if file.package != "course"), MAX_LINES),
        ("course", sum(file.lines for file in files if file.package == "course"), MAX_COURSE_LINES),
        ("median function", int(statistics.median(functions.values() or [0])), MAX_FUNCTION_MEDIAN),
        ("90th percentile of functions", percentile(functions.values(), 0.9), MAX_FUNCTION_P90),
        *((f"file {file.path}", file.lines, MAX_FILE_LINES) for file in files),
        *((f"function {name}", n, MAX_FUNCTION_LINES) for name, n in functions.items()),
    ]
    return [f"{what} has {n:,} code lines, at most {limit:,} are allowed" for what, n, limit in checks if n > limit]


def table(files: list[FileSize]) -> str:
    """Code lines, files and function lengths of each package, as plain text."""
    packages = sorted({file.package for file in files}, key=lambda name: (name not in ENGINE, name))
    rows = [_row(name, [f for f in files if f.package == name]) for name in packages]
    rows.append(_row("engine proper", [f for f in files if f.package in ENGINE]))
    rows.append(_row("minivllm", files))
    head = f"{'package':<16}{'files':>6}{'lines':>8}{'functions':>11}{'median':>8}{'p90':>6}{'longest':>9}"
    return "\n".join([head, "-" * len(head), *rows])


def _row(name: str, files: list[FileSize]) -> str:
    lengths = [n for file in files for n in file.functions.values()]
    median = statistics.median(lengths) if lengths else 0
    return (
        f"{name:<16}{len(files):>6}{sum(f.lines for f in files):>8,}{len(lengths):>11}"
        f"{median:>8.3g}{percentile(lengths, 0.9):>6}{max(lengths, default=0):>9}"
    )


def main() -> int:
    """Print the table; exit code 1, with the reasons, when a ceiling is broken."""
    files = measure_all()
    print(table(files))
    broken = over_limits(files)
    for sentence in broken:
        print(f"too big: {sentence}", file=sys.stderr)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())

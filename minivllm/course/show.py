"""Show the engine's own code in a lesson: live, with file and line, so that it can't go stale.

Of what is an exercise only the contract is shown, signature and docstring, until the reader's own version passes: a
textbook that prints the answer below the question takes the exercise away.
"""

from __future__ import annotations

import ast
import html
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from minivllm.course.manifest import ROOT, CourseError, Exercise, Hole, load_manifest
from minivllm.course.progress import has_passed
from minivllm.course.source import Definition, find_body, first_line, parse_file

_RULES = {  # one colour for light pages, one for dark ones; both readable on their background
    "k": ("#7928a1", "#dcb0f5"), "s": ("#116b33", "#a5d6a0"), "c1": ("#5f6368", "#a0a6ad"), "mi": ("#8a4b00", "#f0b77a"),
    "nf": ("#00538f", "#8fc7ff"), "nc": ("#00538f", "#8fc7ff"), "nd": ("#8a4b00", "#f0b77a"),
}  # fmt: skip
_ALIKE = {"k": "kc kd kn kr ow", "s": "sd s1 s2 sa se si", "c1": "c", "mi": "mf", "nf": "fm", "nc": "", "nd": ""}


def _selectors(token: str) -> list[str]:
    return [token, *_ALIKE[token].split()]


def _style() -> str:
    """Light colours, and dark ones where the page says so: the book, JupyterLab, or else the reader's system."""
    light = "".join(f"{','.join(f'.shown .{t}' for t in _selectors(k))}{{color:{v[0]}}}" for k, v in _RULES.items())
    dark = "".join(
        f"{','.join(f'{page} .shown .{t}' for page in _DARK_PAGES for t in _selectors(k))}{{color:{v[1]}}}"
        for k, v in _RULES.items()
    )
    return _FRAME + light + dark


_DARK_PAGES = ('html[data-theme="dark"]', 'body[data-jp-theme-light="false"]')
_FRAME = (
    ".shown{border:1px solid #8886;border-radius:4px;margin:1em 0;font-size:.9em}"
    ".shown figcaption{padding:.3em .8em;border-bottom:1px solid #8886;font-size:.9em;text-align:left}"
    ".shown pre{margin:0;padding:.6em .8em;overflow-x:auto;white-space:pre-wrap;background:none;border:none;color:inherit}"
    ".shown .pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr))}"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Source lines under the line that says where they stand and, where something was left out, why."""

    where: str
    code: str
    note: str = ""

    @property
    def html(self) -> str:
        body = highlight(self.code, PythonLexer(), HtmlFormatter(nowrap=True))
        note = f"<br><em>{html.escape(self.note)}</em>" if self.note else ""
        return f"<figcaption><code>{html.escape(self.where)}</code>{note}</figcaption><pre>{body}</pre>"

    def __str__(self) -> str:
        return "\n".join(filter(None, [f"# {self.where}", self.note and f"# {self.note}", self.code]))


class Shown:
    """Source that notebooks and the book show highlighted and terminals as text; two pieces stand side by side."""

    def __init__(self, *pieces: Piece) -> None:
        self.pieces = pieces

    def _repr_html_(self) -> str:
        inner = "".join(f"<div>{piece.html}</div>" for piece in self.pieces)
        return f'<figure class="shown"><style>{_style()}</style><div class="pair">{inner}</div></figure>'

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self.pieces))


def show(target: str | Callable[..., Any], *, reveal: bool = False, beside: Callable[..., Any] | None = None) -> Shown:
    """Show a function, method or class, named `module:qualname` (or given itself).

    Where it is an exercise, or a class holds one, its body is left out unless `reveal` is set or the reader's own version
    passed; of a class that is one, private methods are too. `beside` puts another function next to it, to compare. Raises `CourseError` if there is nothing of that name.
    """
    hole = _as_hole(target)
    pieces = [_piece(hole, reveal)]
    if beside is not None:
        pieces.insert(0, _plain_piece(beside))
    return Shown(*pieces)


def _as_hole(target: str | Callable[..., Any]) -> Hole:
    if not isinstance(target, str):
        return Hole(target.__module__, target.__qualname__)
    try:
        return Hole.parse(target)
    except ValueError as error:
        raise CourseError(f"show: {error}") from None


def _piece(hole: Hole, reveal: bool) -> Piece:
    path, lines, node = _find(hole)
    closed = {} if reveal else _closed_holes(hole)
    code = textwrap.dedent("\n".join(_without(lines, node, hole.qualname, closed)))
    note = "; ".join(f"{e.id} is yours to write: contract only" for e in dict.fromkeys(closed.values()))
    return Piece(f"{path}, line {first_line(node)}", code, note)


def _find(hole: Hole) -> tuple[str, list[str], Definition]:
    """The file as a reader knows it, its lines, and the definition."""
    path = ROOT / hole.path
    try:
        _, node = find_body(parse_file(path), hole.qualname)
    except KeyError:
        raise CourseError(f"show: {hole.path} has no {hole.qualname}") from None
    return hole.path, path.read_text().splitlines(), node


def _closed_holes(hole: Hole) -> dict[str, Exercise]:
    """Exercises that the target is, or holds, and that the reader hasn't passed yet: by qualified name."""
    return {
        h.qualname: exercise
        for exercise in exercises()
        for h in exercise.holes
        if h.module == hole.module and _within(h.qualname, hole.qualname) and not has_passed(exercise)
    }


def _within(inner: str, outer: str) -> bool:
    """Whether one of the two qualified names holds the other."""
    return f"{inner}.".startswith(f"{outer}.") or f"{outer}.".startswith(f"{inner}.")


def exercises() -> list[Exercise]:
    """All exercises; none where the manifest is missing (an installed wheel)."""
    return list(load_manifest().values()) if (ROOT / "exercises" / "manifest.toml").exists() else []


def _without(lines: list[str], node: Definition, qualname: str, closed: dict[str, Exercise]) -> list[str]:
    """The definition's lines; of closed holes bodies become an ellipsis, and private methods, no part of the contract, go."""
    kept = lines[: node.end_lineno]
    for inner, name in reversed(list(_functions(node, qualname))):
        if any(_within(name, hole) and len(name) >= len(hole) for hole in closed):
            first, last = _body_span(inner)
            if inner is not node and inner.name.startswith("_") and not inner.name.endswith("__"):
                del kept[first_line(inner) - 2 : last]  # with the empty line before it
            elif first <= last:
                kept[first - 1 : last] = [" " * (inner.col_offset + 4) + "..."]
    return kept[first_line(node) - 1 :]


def _functions(node: Definition, qualname: str) -> list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """The functions that stand directly in a definition, or the function itself, in order, with qualified names."""
    if not isinstance(node, ast.ClassDef):
        return [(node, qualname)]
    found = []
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((child, f"{qualname}.{child.name}"))
    return found


def _body_span(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """First and last line of a function's body behind its docstring; comments between them count as body."""
    documented = ast.get_docstring(node) is not None
    first = node.body[0].end_lineno if documented else node.body[0].lineno - 1
    assert first is not None
    assert node.end_lineno is not None
    return first + 1, node.end_lineno


def _plain_piece(function: Callable[..., Any]) -> Piece:
    lines, first = inspect.getsourcelines(function)
    path = Path(inspect.getsourcefile(function) or "?")
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return Piece(f"{where}, line {first}", textwrap.dedent("".join(lines)).rstrip())

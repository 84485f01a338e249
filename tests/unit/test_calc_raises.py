"""A public function of the calculator that can raise says what, also where it is another one that raises for it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CALC = Path(__file__).parents[2] / "minivllm" / "calc"


def contracts() -> Iterator[tuple[str, ast.AST, str]]:
    """Name, code and docstring of functions, methods, and classes that check their fields. A property works on what was checked."""
    for path in sorted(CALC.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield (
                    node.name,
                    ast.Module([m for m in node.body if getattr(m, "name", "") == "__post_init__"]),
                    doc(node),
                )
            elif isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name != "__post_init__":
                yield node.name, node, doc(node)


def doc(node: ast.ClassDef | ast.FunctionDef) -> str:
    return ast.get_docstring(node) or ""


CODE = {name: code for name, code, _ in contracts()}
TOLD = {name: docstring for name, _, docstring in contracts()}


def raised(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Names of the errors that a function, or one that it calls, raises."""
    errors: set[str] = set()
    for node in ast.walk(CODE[name]):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            errors.add(ast.unparse(node.exc.func))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in CODE and called not in seen | {name}:
                errors |= raised(called, seen | {name})
    return errors


RAISING = sorted(name for name in CODE if not name.startswith("_") and raised(name))


def test_the_walk_finds_what_raises_itself_and_what_raises_through_another():
    assert {"stranded_blocks", "Budget", "find_shape", "decode_step", "num_blocks"} <= set(RAISING)
    assert "linear_flops" not in RAISING


@pytest.mark.parametrize("name", RAISING)
def test_the_docstring_names_every_error(name):
    assert [error for error in raised(name) if f"`{error}`" not in TOLD[name]] == []

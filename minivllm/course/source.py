"""Finding things in Python source by name. Shared by what cuts exercises out of the engine and what splices answers in."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from minivllm.course.manifest import CourseError, Hole

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def parse_file(path: Path) -> ast.Module:
    """The syntax tree of a file; `CourseError` with file and line if it has none."""
    try:
        return ast.parse(path.read_text(), str(path))
    except FileNotFoundError:
        raise CourseError(f"{path} does not exist") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise CourseError(f"{path}:{line}: {getattr(error, 'msg', error)}") from None


def find_body(tree: ast.Module, qualname: str) -> tuple[list[ast.stmt], Definition]:
    """The definition of that qualified name, and the list of statements it stands in. `KeyError` if there is none.

    Of several definitions of one name (overloads, a property and its setter) the last counts, as it does in Python.
    """
    body: list[ast.stmt] = tree.body
    node: Definition | None = None
    for name in qualname.split("."):
        if node is not None:
            body = node.body
        found = [child for child in body if isinstance(child, DEFINITIONS) and child.name == name]
        if not found:
            raise KeyError(qualname)
        node = found[-1]
    assert node is not None
    return body, node


def first_line(node: Definition) -> int:
    """The line of a definition's first decorator, or of itself."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


def names_used(*nodes: ast.AST) -> set[str]:
    """Every name read or written anywhere in the nodes."""
    return {child.id for node in nodes for child in ast.walk(node) if isinstance(child, ast.Name)}


def bound_names(statement: ast.stmt) -> set[str]:
    """Names that a statement binds where it stands: imports, definitions, assignments."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    if isinstance(statement, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {name for target in targets for name in _names_in_target(target)}
    return set()


def imported(statement: ast.Import | ast.ImportFrom, name: str) -> ast.alias | None:
    """The part of an import that binds a name."""
    return next((alias for alias in statement.names if (alias.asname or alias.name.partition(".")[0]) == name), None)


def _names_in_target(target: ast.expr) -> set[str]:
    """Names that an assignment binds; `thing.attribute = ...` and `thing[0] = ...` bind none."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Tuple | ast.List):
        return {name for element in target.elts for name in _names_in_target(element)}
    return _names_in_target(target.value) if isinstance(target, ast.Starred) else set()


def solved_hole(node: ast.stmt) -> Hole | None:
    """The hole named by a definition's `@solves(...)`, if it has one."""
    if not isinstance(node, DEFINITIONS):
        return None
    for decorator in node.decorator_list:
        if is_solves(decorator):
            assert isinstance(decorator, ast.Call)
            argument = decorator.args[0] if decorator.args else None
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise CourseError(f"line {node.lineno}: @solves needs a plain string, as in @solves('module:name')")
            try:
                return Hole.parse(argument.value)
            except ValueError as error:
                raise CourseError(f"line {node.lineno}: @solves: {error}") from None
    return None


def is_solves(decorator: ast.expr) -> bool:
    """Whether a decorator is `@solves(...)`."""
    return isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "solves"


@dataclass(slots=True)
class Answer:
    """A student's file, taken apart: what stands for which hole, and what stands beside it.

    `beside` are the top-level statements that solve nothing (imports, helpers); `inside` those within a class that is
    only there to hold methods, by the class's qualified name.
    """

    path: Path
    solved: dict[Hole, Definition] = field(default_factory=dict)
    beside: list[ast.stmt] = field(default_factory=list)
    inside: dict[str, list[ast.stmt]] = field(default_factory=dict)


def read_answer(path: Path) -> Answer:
    """Take a student's file apart. `CourseError` for bad syntax, bad marks, or a hole solved twice."""
    answer = Answer(path)
    try:
        for statement in parse_file(path).body:
            _sort(answer, statement, "")
    except CourseError as error:
        raise CourseError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return answer


def _sort(answer: Answer, statement: ast.stmt, within: str) -> None:
    hole = solved_hole(statement)
    if hole is not None:
        assert isinstance(statement, DEFINITIONS)
        if hole in answer.solved:
            raise CourseError(f"line {statement.lineno}: {hole} is solved twice in this file")
        if hole.qualname != within + statement.name:
            raise CourseError(
                f"line {statement.lineno}: {within + statement.name} is marked as {hole.qualname}; keep names and nesting"
            )
        answer.solved[hole] = statement
    elif isinstance(statement, ast.ClassDef) and _holds_solutions(statement):
        for child in statement.body:
            _sort(answer, child, f"{within}{statement.name}.")
    elif within:
        answer.inside.setdefault(within[:-1], []).append(statement)
    else:
        answer.beside.append(statement)


def _holds_solutions(node: ast.ClassDef) -> bool:
    return any(
        solved_hole(child) is not None or (isinstance(child, ast.ClassDef) and _holds_solutions(child))
        for child in node.body
    )

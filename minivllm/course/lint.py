"""What a look at a student's file already says: why it can't be graded, and what a lecturer should look at."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from minivllm.course.manifest import CourseError, Exercise
from minivllm.course.source import read_answer

UNUSUAL_MODULES = {
    "_pytest", "ast", "builtins", "code", "ctypes", "faulthandler", "gc", "hypothesis", "importlib", "inspect",
    "linecache", "marshal", "multiprocessing", "os", "pathlib", "pickle", "pluggy", "psutil", "pty", "pytest",
    "resource", "runpy", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "traceback",
    "unittest",
}  # fmt: skip
UNUSUAL_CALLS = {
    "__import__", "breakpoint", "compile", "eval", "exec", "exit", "globals", "input", "locals", "open", "quit", "vars",
}  # fmt: skip
UNUSUAL_ATTRIBUTES = {
    "__builtins__", "__code__", "__globals__", "__subclasses__", "_getframe", "f_back", "f_globals", "f_locals",
    "modules", "settrace", "tb_frame",
}  # fmt: skip


@dataclass(slots=True)
class Findings:
    """`refused`: why the file is not graded. `flags`: unusual, graded all the same, for a human to look at."""

    refused: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)


def inspect_answer(path: Path, exercise: Exercise, *, complete: bool = True) -> Findings:
    """Look through a student's file. With `complete`, every hole must be filled: one that is left out would be the engine's."""
    findings = Findings()
    try:
        answer = read_answer(path)
        tree = ast.parse(path.read_text())
    except CourseError as error:
        findings.refused.append(str(error))
        return findings
    missing = [hole for hole in exercise.holes if hole not in answer.solved]
    if complete and missing:
        findings.refused.append(f"{path.name} has no @solves for {', '.join(map(str, missing))}; put the stub's back")
    foreign = [
        hole for hole in answer.solved if not any(_within(hole.module, hole.qualname, h) for h in exercise.holes)
    ]
    if foreign:
        findings.refused.append(
            f"{path.name} also solves {', '.join(map(str, foreign))}, which {exercise.id} doesn't ask for"
        )
    _look(tree, exercise, findings)
    return findings


def _within(module: str, qualname: str, hole: object) -> bool:
    """Whether a name is the hole or a member of it."""
    return f"{module}:{qualname}.".startswith(f"{hole}.")


def _look(tree: ast.Module, exercise: Exercise, findings: Findings) -> None:
    modules = _module_aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _imported(node.lineno, alias.name, None, exercise, findings)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                _imported(node.lineno, "." * node.level + (node.module or ""), alias.name, exercise, findings)
        elif isinstance(node, ast.Attribute):
            module = modules.get(ast.unparse(node.value))
            if module is not None and any(f"{module}:{node.attr}" == str(hole) for hole in exercise.holes):
                findings.refused.append(
                    f"line {node.lineno}: uses the engine's own {node.attr}, which is to be written here"
                )
            if node.attr in UNUSUAL_ATTRIBUTES:
                findings.flags.append(f"line {node.lineno}: .{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNUSUAL_CALLS:
            findings.flags.append(f"line {node.lineno}: {node.func.id}()")


def _module_aliases(tree: ast.Module) -> dict[str, str]:
    """What whole modules are called in the file: `{"p": "minivllm.kv.prefix"}`."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return aliases


def _imported(line: int, module: str, name: str | None, exercise: Exercise, findings: Findings) -> None:
    top = module.partition(".")[0]
    if module == "minivllm.course" and name == "solves":
        return
    if top in ("solutions", "tests", "exercises") or f"{module}.{name}".startswith("minivllm.course"):
        findings.refused.append(f"line {line}: imports {module}, which holds answers or grades them")
    elif module.startswith("."):
        findings.refused.append(
            f"line {line}: a relative import has no meaning in the engine; write the module's full name"
        )
    elif name is not None and any(f"{module}:{name}" == str(hole) for hole in exercise.holes):
        findings.refused.append(f"line {line}: imports the engine's own {name}, which is to be written here")
    elif top in UNUSUAL_MODULES:
        findings.flags.append(f"line {line}: imports {module}")

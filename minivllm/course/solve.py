"""`%%solve kv-02`: try an exercise in a notebook. The cell's definitions take the engine's place for as long as the kernel runs.

    %load_ext minivllm.course.solve

    %%solve kv-02
    def hash_block(parent, token_ids, salt=""):
        ...

This sets attributes in loaded modules, which is enough to play with; grading compiles the file in `exercises/` into the
engine instead (`minivllm.course.splice`). So bring what works there.
"""

from __future__ import annotations

import ast
import importlib
import sys
from types import ModuleType
from typing import Any

from minivllm.course import solves
from minivllm.course.manifest import CourseError, Exercise, Hole, find_exercise, load_manifest
from minivllm.course.source import find_body


def solve(exercise: Exercise, code: str) -> list[Hole]:
    """Put the definitions in `code` in the engine's place; returns the holes that they fill, at least one.

    The code sees the names of the module that it is for. Raises `CourseError` if it defines none of the exercise's holes.
    """
    tree = ast.parse(code, f"<{exercise.id}>")
    filled = [hole for hole in exercise.holes if _defines(tree, hole.qualname)]
    if not filled:
        wanted = ", ".join(hole.qualname for hole in exercise.holes)
        raise CourseError(f"{exercise.id}: this cell defines none of {wanted}")
    for name in dict.fromkeys(hole.module for hole in filled):
        module = importlib.import_module(name)
        space = vars(module) | {"solves": solves}
        exec(compile(tree, f"<{exercise.id}>", "exec"), space)
        for hole in filled:
            if hole.module == name:
                _put(module, hole.qualname.split("."), space)
    return filled


def _defines(tree: ast.Module, qualname: str) -> bool:
    try:
        find_body(tree, qualname)
    except KeyError:
        return False
    return True


def _put(module: ModuleType, path: list[str], space: dict[str, Any]) -> None:
    """Set one attribute: a method in the engine's class, a function or class in every module that has the engine's."""
    if len(path) > 1:
        owner, new = getattr(module, path[0]), space[path[0]]
        for name in path[1:-1]:
            owner, new = getattr(owner, name), getattr(new, name)
        setattr(owner, path[-1], vars(new)[path[-1]])
        return
    old, new = getattr(module, path[0]), space[path[0]]
    for user in [m for name, m in sys.modules.items() if name.split(".")[0] == "minivllm"]:
        for name, value in list(vars(user).items()):
            if value is old:
                setattr(user, name, new)


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext` calls."""

    def magic(line: str, cell: str) -> None:
        exercise = find_exercise(load_manifest(), line.strip())
        filled = ", ".join(hole.qualname for hole in solve(exercise, cell))
        print(f"{exercise.id}: {filled} of this notebook's engine is now yours")

    shell.register_magic_function(magic, magic_kind="cell", magic_name="solve")

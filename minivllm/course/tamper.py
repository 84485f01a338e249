"""Noticing that graded code changed what grades it: pytest, Hypothesis, builtins and the grader itself.

Functions and classes of those modules are noted before a student's file is imported, and compared after that and when all tests have run.
Reading the solutions while being graded is refused by an audit hook, which nothing in the process can take away again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

WATCHED = (
    "pytest",
    "_pytest",
    "pluggy",
    "hypothesis",
    "minivllm.course",
    "builtins",
    "json",
    "os",
    "operator",
    "unittest",
)
"""Top-level names of what must stay as it is; submodules included."""

Fingerprint = dict[tuple[str, ...], tuple[Any, ...]]


def fingerprint() -> Fingerprint:
    """Identity and code of every function and class of the watched modules that are loaded."""
    prints: Fingerprint = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and _watched(name):
            prints[name,] = (module,)
            for key, value in list(vars(module).items()):
                _note(prints, (name, key), value)
                if isinstance(value, type) and value.__module__ == name:
                    for attribute, member in list(vars(value).items()):
                        _note(prints, (name, key, attribute), member)
    return prints


def first_change(before: Fingerprint) -> str | None:
    """The dotted name of something that is not what it was, or None."""
    now = fingerprint()
    for key, value in before.items():
        other = now.get(key)
        if other is None or len(other) != len(value) or any(a is not b for a, b in zip(value, other, strict=True)):
            return ".".join(key)
    return None


def _watched(name: str) -> bool:
    return any(name == top or name.startswith(top + ".") for top in WATCHED)


def _note(prints: Fingerprint, key: tuple[str, ...], value: Any) -> None:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, FunctionType):
        prints[key] = (value, value.__code__, value.__defaults__)
    elif isinstance(value, BuiltinFunctionType | type):
        prints[key] = (value,)


def forbid_reading(folder: Path) -> None:
    """From now on, opening a file below `folder` raises `PermissionError`, in this process, for good."""
    forbidden = str(folder) + "/"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(path := arguments[0], str) and path.startswith(forbidden):
            raise PermissionError(f"{path}: solutions are closed while exercises are graded")

    sys.addaudithook(hook)

"""Holes of the engine as compiled code: what stands for them in a tree that is handed to students (`minivllm.course.handout`).

There `block_pool.py` has each hole's signature and contract only, marked `@_reference("BlockPool.free")`; the engine's own
version lies beside it in `block_pool.ref`, marshalled. That deters and keeps no secret: whoever wants to can read it.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import marshal
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from minivllm.course.manifest import CourseError

HEADER = "from minivllm.course.reference import load as _load\n\n_reference = _load(__file__, globals())\n"
"""What a module with references needs behind its imports from the future."""


def compile_reference(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, qualname: str) -> CodeType:
    """Code that defines one function or class. Raises `CourseError` for what only works where it stood: a method with
    `super()`, or source that `triton.jit` reads."""
    text = "".join(ast.unparse(decorator) for decorator in node.decorator_list)
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    if "jit" in text or ("." in qualname and names & {"super", "__class__"}):
        raise CourseError(f"{qualname} can't be handed out compiled: it needs its source, or the class around it")
    tree = ast.Module([node], type_ignores=[])
    flags = __future__.annotations.compiler_flag
    code: CodeType = compile(tree, f"<the engine's {qualname}>", "exec", flags, dont_inherit=True)
    return code


def dump(codes: dict[str, CodeType]) -> bytes:
    """The content of a `.ref` file: only the Python version that wrote it can read it, so its mark comes first."""
    return importlib.util.MAGIC_NUMBER + marshal.dumps(codes)


def load(file: str, space: dict[str, Any]) -> Callable[[str], Callable[[Any], Any]]:
    """A decorator that puts a module's compiled version, by qualified name, in place of what it decorates.

    `file` and `space` are the module's `__file__` and `globals()`. Raises `CourseError` under another Python version.
    """
    data = Path(file).with_suffix(".ref").read_bytes()
    mark = importlib.util.MAGIC_NUMBER
    if not data.startswith(mark):
        raise CourseError(f"{file}: made for another Python version; README.md says for which")
    codes = marshal.loads(data[len(mark) :])

    def reference(qualname: str) -> Callable[[Any], Any]:
        return lambda placeholder: _define(codes[qualname], qualname, space)

    return reference


def _define(code: CodeType, qualname: str, space: dict[str, Any]) -> Any:
    """Run the definition among the module's names, without adding to them."""
    defined: dict[str, Any] = {}
    exec(code, space, defined)
    thing = defined[qualname.rpartition(".")[2]]
    getattr(thing, "fget", thing).__qualname__ = qualname
    return thing

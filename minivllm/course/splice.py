"""Compile the engine with a student's functions in place of its own.

A module with a hole is compiled from one syntax tree: the engine's, with the student's definition put where the engine's
stood. So whatever Python decides from where code stands just works: `super()`, properties, slots, names that other
modules import, source that `triton.jit` reads. Nothing is patched afterwards, and the engine's own version of the hole does
not exist in the process.

Tracebacks show the student's file and line: while the trees are joined, the student's line numbers carry an offset that no
real file reaches; code objects that were compiled from there then get the student's file name, and the offset is taken off.

Spawned processes splice too: `install` leaves the paths in the environment, and `import minivllm` looks for them there.
"""

from __future__ import annotations

import ast
import copy
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, ModuleType

from minivllm.course.manifest import ROOT, CourseError, Hole
from minivllm.course.source import (
    Answer,
    Definition,
    bound_names,
    find_body,
    imported,
    is_solves,
    names_used,
    read_answer,
)

ENVIRONMENT = "MINIVLLM_WITH"
LINE_OFFSET = 1_000_000
"""Line numbers of the i-th answer (from 1) are moved by i times this: no source file is that long."""


class SpliceError(CourseError):
    """An answer cannot be put into the engine; the message says what to change."""


def install(paths: Iterable[Path]) -> list[Path]:
    """From now on, import engine modules with the answers in these files (or folders) in place; returns the files used.

    Of a folder, files that still are untouched stubs are left out. Call it before the engine is imported: raises
    `SpliceError` if a module with a hole is loaded already.
    """
    finder = Finder.read(paths)
    for module in finder.modules:
        if module in sys.modules:
            raise SpliceError(f"{module} is imported already: call splice.install before importing the engine")
    activate(finder)
    return finder.files


def activate(finder: Finder) -> None:
    """Let a finder serve all imports from now on, in this process and in those that it starts."""
    uninstall()
    sys.meta_path.insert(0, finder)
    os.environ[ENVIRONMENT] = os.pathsep.join(map(str, finder.files))


def install_from_environment() -> None:
    """Install what a parent process installed, if it did."""
    if paths := os.environ.get(ENVIRONMENT):
        install([Path(path) for path in paths.split(os.pathsep)])


def uninstall() -> None:
    """Import the engine as it is again. Modules that are loaded stay as they are."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    os.environ.pop(ENVIRONMENT, None)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [
        file for file in sorted(path.glob("*.py")) if "@solves(" in (text := file.read_text()) and not is_stub(text)
    ]


def is_stub(text: str) -> bool:
    """Whether a file still raises some stub's NotImplementedError."""
    return any(line.strip().startswith("raise NotImplementedError(") for line in text.splitlines())


class Finder(MetaPathFinder):
    """Finds engine modules that have a hole in one of the answers, and hands them to a `SplicedLoader`."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.files = [answer.path for answer in answers]
        self.modules: dict[str, list[Answer]] = {}
        owner: dict[Hole, Path] = {}
        for answer in answers:
            for hole in answer.solved:
                if (other := owner.setdefault(hole, answer.path)) is not answer.path:
                    raise SpliceError(f"{hole} is solved in {other} and in {answer.path}: name one of them")
                if answer not in (users := self.modules.setdefault(hole.module, [])):
                    users.append(answer)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Finder:
        """A finder for the answers in files and folders."""
        return cls([read_answer(file) for path in paths for file in _files(Path(path).resolve())])

    def check(self) -> None:
        """Join and compile all modules without running them. Raises `SpliceError`."""
        for module, answers in self.modules.items():
            spec = importlib.machinery.PathFinder.find_spec(module, [str(_folder_of(module))])
            if spec is None or spec.origin is None:
                raise SpliceError(f"{answers[0].path}: the engine has no module {module}")
            splice(Path(spec.origin).read_text(), spec.origin, module, answers)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The ordinary spec of a module with a hole, with another loader; None for all other modules."""
        if fullname not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            raise SpliceError(f"the engine has no module {fullname}")
        spec.loader = SplicedLoader(fullname, spec.origin, self.modules[fullname])
        spec.cached = None
        return spec


def _folder_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")[:-1])


class SplicedLoader(importlib.machinery.SourceFileLoader):
    """Loads one engine module with answers in it, without touching the bytecode cache."""

    def __init__(self, fullname: str, path: str, answers: list[Answer]) -> None:
        super().__init__(fullname, path)
        self.answers = answers

    def get_code(self, fullname: str) -> CodeType:
        """The joined code of the module."""
        return splice(Path(self.path).read_text(), self.path, fullname, self.answers)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module; an error in a student's top-level line gets a note with that line."""
        try:
            super().exec_module(module)
        except Exception as error:
            trace = error.__traceback__
            while trace is not None:
                index, line = divmod(trace.tb_lineno, LINE_OFFSET)
                if index:
                    error.add_note(f"in {self.answers[index - 1].path}, line {line}")
                trace = trace.tb_next
            raise


def splice(source: str, filename: str, module: str, answers: Sequence[Answer]) -> CodeType:
    """Compile an engine module's source with the answers in it. Raises `SpliceError`."""
    tree = ast.parse(source, filename)
    for index, answer in enumerate(answers, 1):
        _join(tree, module, copy.deepcopy(answer), index * LINE_OFFSET)
    files = {index: str(answer.path) for index, answer in enumerate(answers, 1)}
    code: CodeType = compile(tree, filename, "exec", dont_inherit=True)
    return _relocate(code, files)


def _relocate(code: CodeType, files: dict[int, str]) -> CodeType:
    """Give code objects with an offset in their line numbers the right file and lines. Lines within a code object are
    stored relative to its first one, so moving that one moves all."""
    index, line = divmod(code.co_firstlineno, LINE_OFFSET)
    constants = tuple(_relocate(c, files) if isinstance(c, CodeType) else c for c in code.co_consts)
    if not index:
        return code.replace(co_consts=constants)
    return code.replace(co_consts=constants, co_filename=files[index], co_firstlineno=line)


def _join(tree: ast.Module, module: str, answer: Answer, offset: int) -> None:
    """Put one answer's definitions, and what they need beside them, into the engine's tree."""
    holes = {hole: node for hole, node in answer.solved.items() if hole.module == module}
    classes = {hole.qualname.rpartition(".")[0] for hole in holes} - {""}
    beside = _needed(answer, module, [*holes.values(), *(s for c in classes for s in answer.inside.get(c, []))])
    _refuse_collisions(tree, beside, answer.path, module)
    first = min(_top_level_index(tree, hole) for hole in holes)
    for hole, node in holes.items():
        _replace(tree, hole, node, offset, answer.path)
    for name in classes:
        _, owner = find_body(tree, name)
        assert isinstance(owner, ast.ClassDef)
        extra = [s for s in answer.inside.get(name, []) if not _is_filler(s)]
        _refuse_collisions(owner, extra, answer.path, name)
        position = min(owner.body.index(node) for node in holes.values() if node in owner.body)
        owner.body[position:position] = [_moved(statement, offset) for statement in extra]
    tree.body[first:first] = [_moved(statement, offset) for statement in beside]


def _moved(statement: ast.stmt, offset: int) -> ast.stmt:
    return ast.increment_lineno(statement, offset)


def _replace(tree: ast.Module, hole: Hole, node: Definition, offset: int, path: Path) -> None:
    try:
        body, old = find_body(tree, hole.qualname)
    except KeyError:
        raise SpliceError(f"{path}: the engine has no {hole}") from None
    node.decorator_list = [d for d in node.decorator_list if not is_solves(d)]
    body[body.index(old)] = _moved(node, offset)


def _top_level_index(tree: ast.Module, hole: Hole) -> int:
    """Where in the module the hole, or the class around it, stands."""
    top = hole.qualname.partition(".")[0]
    for index, statement in enumerate(tree.body):
        if top in bound_names(statement):
            return index
    raise SpliceError(f"the engine has no {hole}")


def _needed(answer: Answer, module: str, used_by: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements beside the holes that this module's holes reach by name, and those that bind no name, in order."""
    candidates = [s for s in answer.beside if not _is_filler(s) and not _imports_from(s, module)]
    wanted = {id(s): s for s in candidates if not bound_names(s) or "*" in bound_names(s)}
    names = names_used(*used_by, *wanted.values())
    while new := {id(s): s for s in candidates if id(s) not in wanted and bound_names(s) & names}:
        wanted |= new
        names |= names_used(*new.values())
    return [s for s in candidates if id(s) in wanted]


def _is_filler(statement: ast.stmt) -> bool:
    """Docstrings, `pass`, imports from the future and of `solves`, and `if __name__ == "__main__"`."""
    match statement:
        case ast.Pass() | ast.Expr(ast.Constant()):
            return True
        case ast.ImportFrom(module="__future__" | "minivllm.course"):
            return True
        case ast.If(ast.Compare(ast.Name("__name__"))):
            return True
    return False


def _imports_from(statement: ast.stmt, module: str) -> bool:
    """What the engine module defines itself needs no import there."""
    return isinstance(statement, ast.ImportFrom) and statement.module == module and not statement.level


def _refuse_collisions(owner: ast.Module | ast.ClassDef, extra: list[ast.stmt], path: Path, where: str) -> None:
    """A helper must not take the place of something of the engine that is no hole. An equal import does no harm."""
    bound = {name: statement for statement in owner.body for name in bound_names(statement)}
    for statement in extra:
        for name in bound_names(statement) & bound.keys():
            if not _same_import(name, statement, bound[name]):
                raise SpliceError(f"{path}:{statement.lineno}: {where} has a {name} of its own; choose another name")


def _same_import(name: str, left: ast.stmt, right: ast.stmt) -> bool:
    return (source := _import_source(name, left)) is not None and source == _import_source(name, right)


def _import_source(name: str, statement: ast.stmt) -> str | None:
    """What an import binds the name to, in full: `collections.abc.Sequence`. None if it is no import."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return None
    prefix = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
    alias = imported(statement, name)
    return prefix + alias.name if alias else None

"""Cut the exercises out of the engine: `python -m minivllm.course.cut [--check] [--force]`.

For each exercise of the manifest it writes `exercises/kv_02_longest_hit.py`, in which signatures and docstrings are the
engine's byte for byte and bodies raise `NotImplementedError`, and `solutions/kv_02_longest_hit.py`, the same not blanked,
with the reasons of `solutions/notes/kv_02.md` on top. An exercise file that was edited is somebody's work: it is left
alone without `--force`. Each stub carries the hash of its own text, so that an edit shows.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minivllm.course.manifest import ROOT, CourseError, Exercise, Hole, load_manifest
from minivllm.course.source import DEFINITIONS, Definition, bound_names, find_body, first_line, imported, names_used

STAMP = re.compile(r"^# cut from the engine: ([0-9a-f]{16})$\n", re.M)


@dataclass(slots=True)
class Module:
    """An engine module's source, by lines, with its tree."""

    name: str
    lines: list[str]
    tree: ast.Module

    @classmethod
    def read(cls, hole: Hole, root: Path) -> Module:
        source = (root / hole.path).read_text()
        return cls(hole.module, source.splitlines(keepends=True), ast.parse(source))

    def find(self, qualname: str) -> Definition:
        try:
            return find_body(self.tree, qualname)[1]
        except KeyError:
            raise CourseError(f"exercises/manifest.toml: the engine has no {self.name}:{qualname}") from None


# one definition


def full_text(module: Module, node: Definition) -> list[str]:
    """A definition's lines, decorators included."""
    return module.lines[first_line(node) - 1 : node.end_lineno]


def blank(module: Module, node: Definition, qualname: str, id: str) -> list[str]:
    """A definition's lines with what a student writes taken out: the body of a function, or of all a class's methods.

    Of a class, methods with a leading underscore go away altogether, except special ones.
    """
    if isinstance(node, ast.ClassDef):
        return _blank_class(module, node, qualname, id)
    end_line, end_column = _head_end(module, node)
    lines = module.lines[first_line(node) - 1 : end_line]
    lines[-1] = lines[-1][:end_column].rstrip() + "\n"
    return [*lines, f'{" " * (node.col_offset + 4)}raise NotImplementedError("{id}: {qualname}")\n']


def _head_end(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int | None]:
    """Line and column where a function's signature and docstring end."""
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        return first.end_lineno or first.lineno, first.end_col_offset
    if first.lineno == node.lineno:
        return first.lineno, first.col_offset
    line = first_line(first) - 1 if isinstance(first, DEFINITIONS) else first.lineno - 1
    while not module.lines[line - 1].partition("#")[0].strip():
        line -= 1
    return line, None


def _blank_class(module: Module, node: ast.ClassDef, qualname: str, id: str) -> list[str]:
    out: list[str] = []
    line = first_line(node)
    for child in node.body:
        if not isinstance(child, DEFINITIONS):
            continue
        out += module.lines[line - 1 : first_line(child) - 1]
        if child.name.startswith("_") and not child.name.endswith("__"):
            out = _without_trailing_comments(out)
        else:
            out += blank(module, child, f"{qualname}.{child.name}", id)
        line = (child.end_lineno or child.lineno) + 1
    out += module.lines[line - 1 : node.end_lineno]
    while not out[-1].strip():
        out.pop()
    return out


def _without_trailing_comments(lines: list[str]) -> list[str]:
    while lines and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        lines = lines[:-1]
    return lines


# one file


def cut(exercise: Exercise, root: Path = ROOT) -> tuple[str, str]:
    """(stub, solution) of an exercise, as file contents."""
    modules: dict[str, Module] = {}
    for hole in exercise.holes:
        if hole.module not in modules:
            modules[hole.module] = Module.read(hole, root)
    solution = _render(exercise, modules, _solution_head(exercise, root), stub=False)
    return stamp(_render(exercise, modules, _stub_head(exercise), stub=True)), solution


def stamp(text: str) -> str:
    """Put the hash of a stub into it, on a line of its own after the docstring."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    head, quotes, tail = text.partition('\n"""\n')
    return f"{head}{quotes}# cut from the engine: {digest}\n{tail}"


def stamped_hash(text: str) -> str | None:
    """The hash that a stub carries."""
    found = STAMP.search(text)
    return found.group(1) if found else None


def is_edited(text: str) -> bool:
    """Whether a stub is no longer as it was cut."""
    return hashlib.sha256(STAMP.sub("", text, count=1).encode()).hexdigest()[:16] != stamped_hash(text)


def _stub_head(exercise: Exercise) -> str:
    path = f"exercises/{exercise.file_name}"
    parts = "\n".join(f"  {part.points:3}  {part.name}" for part in exercise.parts)
    run = f'\nRun it:    python -m minivllm.course.run --with {path} "What is the capital of France?"'
    if all(hole.module.startswith("minivllm.calc.") for hole in exercise.holes):
        run = ""  # the engine doesn't call the calculator
    return f'''"""{exercise.id} · {exercise.title} · chapter {exercise.chapter} · about {exercise.minutes} minutes · {exercise.points} points

Replace each `raise NotImplementedError`. Signature and docstring are the contract; everything that they allow is right.
Add helpers and imports as you like; keep the names and the @solves marks.

{parts}

Grade it:  python -m minivllm.course.grade {exercise.id}          (--hint for a hint){run}
"""
'''


def _solution_head(exercise: Exercise, root: Path) -> str:
    notes = root / "solutions" / "notes" / f"{exercise.slug}.md"
    why = notes.read_text().strip() if notes.exists() else ""
    body = f"\n\n{why}\n" if why else ""
    return f'"""{exercise.id} · {exercise.title}: the engine\'s own answer, cut from it. Do not edit.{body}"""\n'


def _render(exercise: Exercise, modules: dict[str, Module], head: str, *, stub: bool) -> str:
    body = "".join(f"\n\n{item}" for item in _items(exercise, modules, stub))
    return f"{head}\nfrom __future__ import annotations\n\n{_imports(exercise, modules, stub)}{body}"


def _items(exercise: Exercise, modules: dict[str, Module], stub: bool) -> Iterator[str]:
    """Each top-level thing: a function or class, or a class that holds the methods asked for."""
    opened: set[tuple[str, str]] = set()
    for hole in exercise.holes:
        owner = hole.qualname.rpartition(".")[0]
        if (hole.module, owner) in opened:
            continue
        module = modules[hole.module]
        if not owner:
            yield _marked(module, hole, exercise.id, stub)
            continue
        opened.add((hole.module, owner))
        together = [h for h in exercise.holes if h.module == hole.module and h.qualname.rpartition(".")[0] == owner]
        yield _class_with(module, owner, together, exercise.id, stub)


def _marked(module: Module, hole: Hole, id: str, stub: bool) -> str:
    node = module.find(hole.qualname)
    lines = blank(module, node, hole.qualname, id) if stub else full_text(module, node)
    return f'{" " * node.col_offset}@solves("{hole}")\n{"".join(lines)}'


def _class_with(module: Module, owner: str, holes: Sequence[Hole], id: str, stub: bool) -> str:
    """The class's header and docstring, a note of what else it has, and the methods asked for."""
    node = module.find(owner)
    assert isinstance(node, ast.ClassDef)
    first = node.body[0]
    documented = ast.get_docstring(node) is not None
    end = (first.end_lineno or first.lineno) if documented else _start(first) - 1
    header = "".join(module.lines[node.lineno - 1 : end])
    methods = "\n".join(_marked(module, hole, id, stub) for hole in holes)
    return f"{header}\n{_members_note(module, node, owner, holes)}\n{methods}"


def _start(statement: ast.stmt) -> int:
    return first_line(statement) if isinstance(statement, DEFINITIONS) else statement.lineno


def _members_note(module: Module, node: ast.ClassDef, owner: str, holes: Sequence[Hole]) -> str:
    """A comment that lists the attributes and methods a student's methods can use: public ones, and what `__init__` sets."""
    asked = {hole.qualname for hole in holes}
    used = {n.attr for q in asked for n in ast.walk(module.find(q)) if isinstance(n, ast.Attribute)}
    attributes, properties, methods = [], [], []
    for child in node.body:
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or f"{owner}.{child.name}" in asked:
            continue
        if child.name == "__init__":
            attributes = [name for name in _attributes(child) if not name.startswith("_") or name in used]
        elif child.name.startswith("_"):
            continue
        elif any(isinstance(d, ast.Name) and d.id == "property" for d in child.decorator_list):
            properties.append(child.name)
        else:
            methods.append(f"{child.name}({ast.unparse(child.args).removeprefix('self').removeprefix(', ')})")
    path = Hole(module.name, owner).path
    text = f"The rest of this class is the engine's, in {path}; your methods join it there. It has {', '.join(attributes + properties)}"
    text += f"; {', '.join(methods)}." if methods else "."
    return "".join(f"    # {line}\n" for line in textwrap.wrap(text, 112, break_long_words=False))


def _attributes(init: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Attributes that `__init__` sets, in order."""
    targets = [
        target
        for statement in ast.walk(init)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    ]
    return [
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    ]


# imports


def _imports(exercise: Exercise, modules: dict[str, Module], stub: bool) -> str:
    """Imports of exactly the module globals that the holes use; private ones only in the solution."""
    statements: dict[str, str] = {"solves": "from minivllm.course import solves"}
    own = {hole.qualname.partition(".")[0] for hole in exercise.holes}
    for hole in exercise.holes:
        module = modules[hole.module]
        for name in sorted(names_used(module.find(hole.qualname)) - own):
            if (stub and name.startswith("_")) or (statement := _import_of(module, name)) is None:
                continue
            if statements.setdefault(name, statement) != statement:
                raise CourseError(f"{exercise.id}: {name} means two things in its modules; split the exercise")
    return _sorted_imports(set(statements.values()))


def _import_of(module: Module, name: str) -> str | None:
    """The statement that gets a module's global into another file; None for what is no global."""
    for statement in module.tree.body:
        if name not in bound_names(statement):
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            alias = imported(statement, name)
            assert alias is not None
            renamed = f" as {alias.asname}" if alias.asname else ""
            if isinstance(statement, ast.Import):
                return f"import {alias.name}{renamed}"
            return f"from {statement.module} import {alias.name}{renamed}"
        return f"from {module.name} import {name}"
    return None


def _sorted_imports(statements: set[str]) -> str:
    """In the order ruff sorts them: standard library, others, minivllm; plain imports first; one line a module."""
    plain: dict[int, list[str]] = {}
    named: dict[int, dict[str, list[str]]] = {}
    for statement in statements:
        words = statement.split()
        top = words[1].partition(".")[0]
        group = 0 if top in sys.stdlib_module_names else 2 if top == "minivllm" else 1
        if words[0] == "import":
            plain.setdefault(group, []).append(statement)
        elif " as " in statement:
            named.setdefault(group, {})[statement] = []
        else:
            named.setdefault(group, {}).setdefault(f"from {words[1]} import", []).append(words[3])
    groups = []
    for group in range(3):
        lines = sorted(plain.get(group, []))
        for start, names in sorted(named.get(group, {}).items()):
            lines.append(f"{start} {', '.join(sorted(names, key=_isort_key))}" if names else start)
        if lines:
            groups.append("\n".join(lines))
    return "\n\n".join(groups) + "\n"


def _isort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


# the command


@dataclass(frozen=True, slots=True)
class File:
    """A generated file: where it goes, what it says, and what to tell if nothing is to be done."""

    path: Path
    text: str
    protected: bool


def generated_files(root: Path = ROOT) -> list[File]:
    """All stubs and solutions."""
    files = []
    for exercise in load_manifest(root).values():
        stub, solution = cut(exercise, root)
        files.append(File(root / "exercises" / exercise.file_name, stub, protected=True))
        files.append(File(root / "solutions" / exercise.file_name, solution, protected=False))
    return files


def check(root: Path = ROOT) -> list[str]:
    """What is wrong with the committed files, one line each; empty if they are what the engine gives."""
    problems = []
    files = generated_files(root)
    for file in files:
        old = file.path.read_text() if file.path.exists() else None
        if old != file.text:
            state = "missing" if old is None else "edited" if file.protected and is_edited(old) else "out of date"
            problems.append(f"{file.path.relative_to(root)}: {state}")
    expected = {file.path for file in files}
    for folder in ("exercises", "solutions"):
        stray = set((root / folder).glob("*.py")) - expected
        problems += [f"{path.relative_to(root)}: no exercise of the manifest" for path in sorted(stray)]
    return problems if files else ["exercises/manifest.toml: lists no exercise"]


def write(root: Path = ROOT, *, force: bool = False) -> list[str]:
    """Write what has changed; returns a line for each file written or left alone because it was edited."""
    report = []
    for file in generated_files(root):
        old = file.path.read_text() if file.path.exists() else None
        if old == file.text:
            continue
        if old is not None and file.protected and is_edited(old) and not force:
            if stamped_hash(old) != stamped_hash(file.text):
                report.append(
                    f"{file.path.relative_to(root)}: yours, kept; but the contract has changed since it was cut"
                )
            continue
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text)
        report.append(f"{file.path.relative_to(root)}: written")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minivllm.course.cut", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is not what the engine gives"
    )
    parser.add_argument("--force", action="store_true", help="also overwrite exercise files that were edited")
    options = parser.parse_args(argv)
    try:
        lines = check() if options.check else write(force=options.force)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines) or "every file is what the engine gives")
    return 1 if options.check and lines else 0


if __name__ == "__main__":
    sys.exit(main())

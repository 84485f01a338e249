"""Who may import whom: arrows point down the house, and memory and decisions know no tensors."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FLOORS = [
    {"config", "request", "plan"},
    {"calc", "obs", "fleet"},
    {"kv", "models", "quant", "minivllm_kernels"},
    {"sched", "runner", "sample"},
    {"llm", "engine"},
    {"cli", "serve", "course", "bench", "__main__", "__init__"},
]
FLOOR = {part: number for number, floor in enumerate(FLOORS) for part in floor}

ON_ONE_FLOOR = {
    ("request", "config"),
    ("plan", "request"),
    ("plan", "config"),
    ("llm", "engine"),
    ("models", "quant"),
    ("models", "minivllm_kernels"),
    ("quant", "minivllm_kernels"),
    ("cli", "serve"),
    ("cli", "course"),
    ("cli", "bench"),
    ("__main__", "cli"),
    ("__init__", "course"),
}
"""(who, whom) on the same floor."""

SOURCES = sorted([*ROOT.glob("minivllm/**/*.py"), *ROOT.glob("kernels/minivllm_kernels/**/*.py")])


def part_of(path: Path) -> str:
    """The part of the house a file belongs to: a folder or a module of minivllm, or minivllm_kernels."""
    folders = path.relative_to(ROOT).with_suffix("").parts
    return folders[1]


def imports(path: Path) -> set[str]:
    """All modules a file names in imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parts_imported(path: Path) -> set[str]:
    parts = set()
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top == "minivllm_kernels":
            parts.add(top)
        elif top == "minivllm" and rest.split(".")[0] in FLOOR:
            parts.add(rest.split(".")[0])
    return parts


def outside(path: Path) -> set[str]:
    """Packages from outside the standard library and this project."""
    tops = {module.partition(".")[0] for module in imports(path)}
    return tops - set(sys.stdlib_module_names) - {"minivllm", "minivllm_kernels"}


def of_part(*parts: str) -> list[Path]:
    return [path for path in SOURCES if part_of(path) in parts]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_point_down(path):
    here = part_of(path)
    assert here in FLOOR, f"{here} has no floor: the architecture says where it belongs"
    up = {
        there
        for there in parts_imported(path) - {here}
        if FLOOR[there] >= FLOOR[here] and (here, there) not in ON_ONE_FLOOR
    }
    assert not up, f"{name(path)} imports {sorted(up)}, which is not below it"


@pytest.mark.parametrize("path", of_part("kv", "sched", "config", "request", "plan"), ids=name)
def test_decisions_about_memory_and_time_need_the_standard_library_only(path):
    assert not outside(path)


@pytest.mark.parametrize("path", of_part("calc"), ids=name)
def test_calculations_need_the_standard_library_only(path):
    assert not outside(path)
    assert not parts_imported(path) - {"calc"}


def test_kernels_know_nothing_of_the_engine():
    assert not [name(p) for p in of_part("minivllm_kernels") if any(m.split(".")[0] == "minivllm" for m in imports(p))]


def test_the_walk_finds_what_it_walks():
    assert {part_of(path) for path in SOURCES} >= {"kv", "sched", "config", "request", "plan"}

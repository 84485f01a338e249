"""The students' tree: what is in it and what isn't, that it works, and the Gradescope autograder made of it."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from minivllm.course import handout
from minivllm.course.manifest import ROOT, CourseError, load_manifest
from tests.cli_support import write_tiny_model

EXERCISES = load_manifest()
POINTS = sum(exercise.points for exercise in EXERCISES.values())


def python(folder: Path, *words: object) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MINIVLLM_WITH")}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that others can read, with the tree `course` and the archive `autograder.zip`."""
    folder = tmp_path_factory.mktemp("handout")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    handout.hand_out(folder / "course")
    handout.gradescope(folder / "course", folder / "autograder.zip")
    return folder


@pytest.fixture(scope="module")
def tree(made: Path) -> Path:
    return made / "course"


def points(tree: Path, impl: Path | str) -> float:
    python(tree, "-m", "minivllm.course.grade", "--impl", impl, "--json", "results.json")
    return json.loads((tree / "results.json").read_text())["score"]


def bodies() -> set[str]:
    """Telling lines of the solutions: those of bodies, that no untouched stub has."""
    lines: set[str] = set()
    for exercise in EXERCISES.values():
        solution = (ROOT / "solutions" / exercise.file_name).read_text().partition("@solves")[2]
        lines |= {line.strip() for line in solution.splitlines()}
    for exercise in EXERCISES.values():
        lines -= {line.strip() for line in handout.cut.cut(exercise)[0].splitlines()}
    return {line for line in lines if len(line) > 40 and line.isascii() and not line.startswith(("def ", "(", "@"))}


class TestTree:
    def test_has_no_solutions_wrong_answers_or_history(self, tree: Path):
        names = {str(path.relative_to(tree)) for path in tree.rglob("*")}
        assert not [n for n in names if "solutions" in n or "mutants" in n or "right_but" in n or ".git/" in n]
        assert {"README.md", "AGENTS.md", "Makefile", "pyproject.toml"} <= names

    def test_has_no_line_that_only_a_solution_has(self, tree: Path):
        texts = {p: p.read_text() for p in tree.rglob("*") if p.suffix in (".py", ".ipynb", ".md", ".toml")}
        graders = {line.strip() for p, text in texts.items() if "tests" in p.parts for line in text.splitlines()}
        assert not [(p.name, line) for line in bodies() - graders for p, text in texts.items() if line in text]

    def test_names_no_command_that_is_missing(self, tree: Path):
        targets = subprocess.run(["make", "-s", "help"], cwd=tree, capture_output=True, text=True, check=True).stdout
        assert [line.split()[1] for line in targets.splitlines() if line.startswith("make")] == [
            "chat", "setup", "grade", "bench",
        ]  # fmt: skip
        texts = "".join((tree / name).read_text() for name in ("README.md", "AGENTS.md", "Makefile"))
        assert not [word for word in ("course.cut", "course.gate", "book.build", "mypy", "pytest -n") if word in texts]

    def test_asks_for_the_python_version_that_it_was_made_with(self, tree: Path):
        assert f'"=={handout.PYTHON}.*"' in (tree / "pyproject.toml").read_text()
        assert all("or newer" not in (tree / name).read_text() for name in ("README.md", "Makefile"))

    def test_a_missing_file_is_to_be_copied_from_the_stubs(self, tree: Path, tmp_path: Path):
        answer = tree / "exercises" / EXERCISES["calc-01"].file_name
        answer.rename(tmp_path / "kept")
        told = python(tree, "-m", "minivllm.course.grade", "calc-01").stdout
        (tmp_path / "kept").rename(answer)
        assert "exercises/stubs has the stub" in " ".join(told.split())

    def test_says_that_it_keeps_no_secret(self, tree: Path):
        assert "no secret" in (tree / "README.md").read_text()

    def test_the_engine_runs_on_its_compiled_parts(self, tree: Path, tmp_path: Path):
        model = write_tiny_model(tmp_path / "model")
        words = (
            "-m",
            "minivllm",
            "generate",
            "Hello",
            "--model",
            model,
            "--max-tokens",
            6,
            "--kv-cache-memory",
            "64KiB",
        )
        there, here = python(tree, *words), python(ROOT, *words)
        assert (there.returncode, there.stdout) == (0, here.stdout), there.stderr

    def test_stubs_earn_nothing(self, tree: Path):
        assert points(tree, "exercises") == 0

    def test_solutions_earn_full_marks(self, tree: Path, made: Path):
        shutil.copytree(ROOT / "solutions", made / "answers")
        assert points(tree, made / "answers") == POINTS

    def test_an_answer_runs_inside_the_engine(self, tree: Path, tmp_path: Path):
        model = write_tiny_model(tmp_path / "model")
        answer = ROOT / "solutions" / "kv_01_block_pool.py"
        words = ("-m", "minivllm", "generate", "Hello", "--model", model, "--max-tokens", 2, "--with", answer)
        assert python(tree, *words, "--kv-cache-memory", "64KiB").returncode == 0

    def test_a_folder_with_something_in_it_is_left_alone(self, tree: Path):
        with pytest.raises(CourseError, match="is not empty"):
            handout.hand_out(tree)


class TestReference:
    def test_another_python_version_is_an_error_that_says_so(self, tmp_path: Path):
        from minivllm.course import reference

        (tmp_path / "module.ref").write_bytes(b"\0\0\r\n")
        with pytest.raises(CourseError, match="another Python version"):
            reference.load(str(tmp_path / "module.py"), {})

    def test_a_method_that_needs_its_class_is_refused(self):
        from minivllm.course.reference import compile_reference

        node = handout.ast.parse("def f(self):\n    return super().f()").body[0]
        with pytest.raises(CourseError, match=r"A\.f can't be handed out"):
            compile_reference(node, "A.f")


class TestGradescope:
    @pytest.fixture
    def autograder(self, made: Path) -> Path:
        """Unpacked as Gradescope does."""
        root = made / "autograder"
        with zipfile.ZipFile(made / "autograder.zip") as zipped:
            zipped.extractall(root / "source")
        (root / "submission").mkdir(exist_ok=True)
        return root

    def run(self, root: Path) -> dict:
        environment = {**os.environ, "AUTOGRADER": str(root), "PYTHON": sys.executable}
        command = ["bash", str(root / "source" / "run_autograder")]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False, cwd="/"
        )
        assert done.returncode == 0, done.stderr
        return json.loads((root / "results" / "results.json").read_text())

    def test_an_exercise_that_is_right_earns_its_points_and_one_that_is_missing_none(self, autograder: Path):
        name = EXERCISES["kv-01"].file_name
        shutil.copy(ROOT / "solutions" / name, autograder / "submission" / name)
        results = self.run(autograder)
        assert results["score"] == EXERCISES["kv-01"].points
        assert sum(test["max_score"] for test in results["tests"] if "max_score" in test) == POINTS
        assert {"name", "score", "max_score", "status", "output", "visibility"} <= results["tests"][0].keys()

    def test_torch_is_installed_only_for_a_grader_that_imports_it(self, made: Path, tree: Path):
        assert handout.requirements(tree, list(EXERCISES.values())) == list(handout.GRADER_NEEDS)
        torch = made / "with_torch"
        shutil.copytree(tree, torch)
        test = torch / EXERCISES["kv-01"].test_file
        test.write_text(test.read_text().replace("import pytest", "import pytest\nimport torch", 1))
        other = torch / EXERCISES["calc-01"].test_file
        other.write_text(
            other.read_text() + "\nst.just(1).map(str).validate()  # Hypothesis looks here whether NumPy is loaded\n"
        )
        assert handout.requirements(torch, [EXERCISES["calc-01"]]) == list(handout.GRADER_NEEDS)
        needs = handout.requirements(torch, [EXERCISES["kv-01"]])
        assert [need for need in needs if need.startswith("torch==")]

    def test_both_scripts_are_executable_shell(self, autograder: Path, made: Path):
        for name in ("setup.sh", "run_autograder"):
            assert subprocess.run(["bash", "-n", autograder / "source" / name], check=False).returncode == 0
            assert zipfile.ZipFile(made / "autograder.zip").getinfo(name).external_attr >> 16 & 0o111

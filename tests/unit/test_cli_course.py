"""`--with`, `grade` and `interview` on the command line."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm.cli.app import app
from minivllm.course.run import split_arguments
from tests.cli_support import write_tiny_model

ROOT = Path(__file__).parents[2]
SOLUTION = "solutions/kv_01_block_pool.py"


def minivllm(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "minivllm", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def test_with_is_taken_out_wherever_it_stands_and_as_often():
    paths, rest = split_arguments(["--with", "a.py", "generate", "-p", "x", "--with=b", "--seed", "3"])
    assert paths == [Path("a.py"), Path("b")]
    assert rest == ["generate", "-p", "x", "--seed", "3"]


def test_generate_runs_through_the_answer_and_gives_the_same_text(model: Path):
    words = ("generate", "Hello", "--model", model, "--max-tokens", 6, "--kv-cache-memory", "64KiB")
    plain, through = minivllm(*words), minivllm(*words, "--with", SOLUTION)
    assert "running with kv_01_block_pool" in through.stderr
    assert (through.returncode, through.stdout) == (0, plain.stdout)


def test_an_answer_that_is_not_written_is_the_code_that_runs(model: Path, tmp_path: Path):
    stub = tmp_path / "kv_01_block_pool.py"
    text = (ROOT / SOLUTION).read_text()
    before, mark, _ = text.partition('    @solves("minivllm.kv.block_pool:BlockPool.free")')
    stub.write_text(f'{before}{mark}\n    def free(self, blocks):\n        raise NotImplementedError("kv-01")\n')
    result = minivllm("generate", "Hello", "--model", model, "--max-tokens", 2, "--with", stub)
    assert "NotImplementedError: kv-01" in result.stderr


def test_a_file_that_does_not_exist_is_one_line_and_exit_code_2():
    result = minivllm("generate", "Hello", "--with", "nothing.py")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_grade_and_interview_read_their_own_arguments():
    grade = CliRunner().invoke(app, ["grade", "no-99"])
    assert grade.exit_code == 2
    assert "usage" in CliRunner().invoke(app, ["grade", "--help"]).stdout
    assert "--rows" in CliRunner().invoke(app, ["interview", "--help"]).stdout

"""The commands that a newcomer types first, as processes, with the default model."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.model
QUESTION = "What is the capital of France?"


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minivllm", *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def test_a_question_is_answered_with_nothing_but_the_answer_on_stdout():
    done = run(QUESTION)
    assert done.returncode == 0
    assert done.stdout == "The capital of France is Paris.\n"
    assert done.stderr.count("\n") == 1
    assert "TTFT" in done.stderr


def test_a_piped_question_gets_the_same_answer():
    assert run(stdin=QUESTION + "\n").stdout == "The capital of France is Paris.\n"


def test_generate_continues_a_text():
    done = run("generate", "--prompt", "The capital of France is", "--max-tokens", "2", "--dtype", "float32", "--json")
    assert json.loads(done.stdout)["text"] == " Paris."

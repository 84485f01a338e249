"""Bad input: one clear line on stderr, a non-zero exit code, nothing on stdout, no traceback."""

import errno
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from minivllm.cli.app import app
from minivllm.cli.ask import ask
from minivllm.cli.bench import bench
from minivllm.cli.chat import chat
from minivllm.cli.generate import generate
from minivllm.cli.plan import plan
from minivllm.cli.trace import trace
from minivllm.models import fetch
from tests.cli_support import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def complaint(*words: object, stdin: str | bytes | None = None) -> str:
    """Run the command line, expect the one line that says what is wrong, and return it."""
    result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_an_unknown_model_names_the_forms_a_model_can_have():
    line = complaint("generate", "-p", "hi", "--model", "no-such-model")
    assert "no-such-model" in line
    assert "hub id" in line


def test_a_truncated_gguf_is_named(tmp_path: Path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x01\x00")
    assert "cut.gguf" in complaint("generate", "-p", "hi", "--model", path)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path):
    path = tmp_path / "text.gguf"
    path.write_text("hello")
    assert "text.gguf" in complaint("generate", "-p", "hi", "--model", path)


def test_a_wrong_architecture_names_those_that_run(tmp_path: Path):
    folder = write_tiny_model(tmp_path / "m", architectures=["MambaForCausalLM"], model_type="mamba")
    line = complaint("generate", "-p", "hi", "--model", folder)
    assert "mamba" in line.lower()
    assert "llama" in line.lower()


def test_a_prompt_longer_than_the_context_says_how_long_both_are(model: Path):
    line = complaint("generate", "-p", "x" * 300, "--model", model, "--kv-cache-memory", "1MiB")
    assert "300 tokens" in line
    assert "255" in line


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (("--max-num-batched-tokens", 0), "max_num_batched_tokens=0"),
        (("--no-chunked-prefill", "--max-num-batched-tokens", 100), "max_num_batched_tokens=100"),
        (("--num-kv-blocks", 3, "--max-model-len", 100), "max_model_len=100"),
        (("--kv-cache-memory", "8KiB", "--max-model-len", 200), "max_model_len=200"),
        (("--kv-cache-memory", "a lot"), "kv_cache_memory='a lot'"),
        (("--max-model-len", 100_000), "max_model_len=100000"),
        (("--max-tokens", 0), "max_tokens=0"),
        (("--temperature", -0.5), "temperature=-0.5"),
        (("--top-p", 0), "top_p=0"),
        (("--stop", ""), "stop="),
        (("--n", 0), "n=0"),
        (("--policy", "lottery"), "policy='lottery'"),
        (("--dtype", "int3"), "dtype='int3'"),
        (("--logprobs", 3), "logprobs=3"),
        (("--hybrid", "maybe"), "hybrid='maybe': must be one of on, off"),
        (("--watermark", 1), "watermark=1.0: must be in [0, 1)"),
        (("--long-prefill-threshold", -1), "long_prefill_threshold=-1: must be at least 0"),
        (("--long-prefill-threshold", 8, "--no-chunked-prefill"), "long_prefill_threshold=8: splits prompts"),
        (("--spec-ngram-min", 0), "spec_ngram_min=0: must be at least 1"),
        (("--spec-ngram-min", 5), "spec_ngram_max=4: must be at least 5"),
        (("--trace", "/no/such/folder/t.jsonl"), "trace_file="),
    ],
)
def test_a_bad_setting_is_named_with_its_value(model: Path, flags: tuple[object, ...], setting: str):
    assert setting in complaint("generate", "-p", "hi", "--model", model, "--kv-cache-memory", "1MiB", *flags)


def flags_of(kind: type) -> list[tuple[str, str]]:
    """(command, flag) for each flag whose value is of this type, in all commands."""
    parsers = get_command(app).commands  # type: ignore[attr-defined]
    hints = {command.__name__: get_type_hints(command) for command in (ask, chat, generate, bench, plan, trace)}
    return [
        (name, max(flag.opts, key=len))
        for name, hint in hints.items()
        for flag in parsers[name].params
        if flag.name in hint and kind in (hint[flag.name], *get_args(hint[flag.name]))
    ]


@pytest.mark.parametrize(("command", "flag"), flags_of(int))
@pytest.mark.parametrize("value", ["1.5", "two", ""])
def test_a_flag_for_whole_numbers_names_itself_and_what_it_was_given(command: str, flag: str, value: str):
    assert complaint(command, flag, value) == f"error: {flag}={value!r}: must be a whole number, in digits\n"


@pytest.mark.parametrize(("command", "flag"), flags_of(float))
def test_a_flag_for_numbers_names_itself_and_what_it_was_given(command: str, flag: str):
    assert complaint(command, flag, "half") == f"error: {flag}='half': must be a number, such as 0.5\n"


def test_all_flags_for_numbers_are_looked_at():
    assert {("generate", "--max-tokens"), ("ask", "--tp"), ("bench", "--reps"), ("plan", "--kv-bits")} <= {
        *flags_of(int)
    }
    assert {("chat", "--top-p"), ("plan", "--memory-utilization")} <= {*flags_of(float)}


def test_the_last_of_several_values_is_the_one_that_counts():
    assert complaint("hello", "--max-tokens", 3, "--max-tokens", "lots").startswith("error: --max-tokens='lots'")


CHOICES = "--hybrid --policy --preemption --spec-method --dtype --device --attention-backend --async-depth"


@pytest.mark.parametrize("flag", CHOICES.split())
def test_a_flag_with_choices_names_the_setting_the_value_and_all_choices(flag: str):
    setting = flag.removeprefix("--").replace("-", "_")
    assert complaint("generate", "hi", flag, 7).startswith(
        f"error: {setting}={7 if 'depth' in flag else '7'!r}: must be one of "
    )


def test_a_prompt_or_a_file_is_needed_but_not_both(model: Path):
    assert "--prompts-file" in complaint("generate", "--model", model)
    assert "--prompts-file" in complaint("generate", "-p", "hi", "--prompts-file", "x", "--model", model)


def test_a_prompts_file_that_cannot_be_read_is_named(model: Path, tmp_path: Path):
    for path in (tmp_path / "none.txt", tmp_path):
        assert str(path) in complaint("generate", "--prompts-file", path, "--model", model)


def test_a_prompts_file_without_a_prompt_is_refused(model: Path, tmp_path: Path):
    path = tmp_path / "empty.txt"
    path.write_text("\n \n")
    assert "holds no prompt" in complaint("generate", "--prompts-file", path, "--model", model)


@pytest.mark.parametrize(("stdin", "what"), [(b"\xff\xfe\x00", "UTF-8"), (b"  \n", "empty")])
def test_bad_piped_input_is_one_line(model: Path, stdin: bytes, what: str):
    assert what in complaint("--model", model, stdin=stdin)


def test_a_cache_directory_without_space_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))

    def full(**where: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch.tempfile, "TemporaryDirectory", full)
    line = complaint("generate", "-p", "hi")
    assert str(tmp_path) in line
    assert "disk is full" in line


def test_an_unknown_workload_or_mode_names_the_known_ones():
    assert "W3-off" in complaint("bench", "--workload", "W9")
    assert "bf16" in complaint("bench", "--mode", "fp7")
    assert "reps=0" in complaint("bench", "--reps", 0)


def test_an_unknown_flag_is_refused_and_not_taken_for_a_prompt():
    for words in (["--frobnicate"], ["generate", "--frobnicate"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert "frobnicate" in result.stderr


def test_a_mistyped_command_is_not_taken_for_a_prompt():
    result = CliRunner().invoke(app, ["genrate"])
    assert result.exit_code == 2
    assert "generate" in result.stderr


def test_the_process_ends_without_a_traceback(model: Path):
    command = [sys.executable, "-m", "minivllm", "--model", str(model), "--max-tokens", "0", "hello"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: max_tokens=0")
    assert done.stderr.count("\n") == 1

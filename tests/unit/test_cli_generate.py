"""`generate` and the bare command: what they write where, on a tiny random model."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm.cli.app import app
from minivllm.cli.flags import SYSTEM
from minivllm.sched.trace import read_trace
from tests.cli_support import write_tiny_model

SMALL = ("--kv-cache-memory", "64KiB", "--dtype", "float32", "--max-tokens", "6")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def run(command: str, model: Path, *words: object, stdin: str | bytes | None = None):
    return CliRunner().invoke(app, [*command.split(), "--model", str(model), *SMALL, *map(str, words)], input=stdin)


def records(result) -> list[dict]:
    return [json.loads(line) for line in result.stdout.splitlines()]


# one answer


def test_a_prompt_argument_gives_the_answer_on_stdout_and_its_cost_on_stderr(model: Path):
    result = CliRunner().invoke(app, [*SMALL, "--model", str(model), "What", "is", "up?"])
    assert result.exit_code == 0
    assert result.stdout.endswith("\n")
    assert result.stderr.count("\n") == 1
    for part in ("TTFT", "tokens/s", "KV blocks", "prefix-cache hits 0 of"):
        assert part in result.stderr


def test_piped_input_is_the_prompt(model: Path):
    piped = run("ask", model, stdin="What is up?\n")
    assert piped.exit_code == 0
    assert piped.stdout == run("ask", model, "What is up?").stdout


def test_the_bare_command_puts_the_prompt_into_the_chat_template(model: Path):
    prompt = f"<system>{SYSTEM}\n<user>hello\n<assistant>"
    assert run("ask", model, "hello").stdout == run("generate", model, "--prompt", prompt).stdout


def test_chat_and_raw_prompts_differ(model: Path):
    chat, raw = (records(run("generate", model, "-p", "hello", "--json", kind))[0] for kind in ("--chat", "--raw"))
    assert raw["usage"]["prompt_tokens"] == 5
    assert chat["usage"]["prompt_tokens"] > 5


# JSON


def test_json_has_one_object_for_each_answer(model: Path):
    result = run("generate", model, "-p", "hello", "--json", "-n", 3, "--temperature", 3, "--seed", 5)
    answers = records(result)
    assert [a["index"] for a in answers] == [0, 1, 2]
    for answer in answers:
        assert len(answer["token_ids"]) == 6 or answer["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == sum(len(a["token_ids"]) for a in answers)
        assert answer["metrics"]["ttft"] > 0
    assert len({tuple(a["token_ids"]) for a in answers}) > 1


def test_a_seed_repeats_the_draw(model: Path):
    first, second = (run("generate", model, "-p", "hi", "--temperature", 1, "--seed", 3).stdout for _ in range(2))
    assert first == second


def test_logprobs_come_with_the_likeliest_tokens(model: Path):
    (answer,) = records(run("generate", model, "-p", "hello", "--json", "--logprobs", 2))
    assert len(answer["logprobs"]) == len(answer["token_ids"])
    assert all(len(entry["top"]) == 2 and entry["rank"] == 1 for entry in answer["logprobs"])


# beams


def test_beams_come_best_first_with_their_scores(model: Path):
    answers = records(run("generate", model, "-p", "hello", "--json", "--beams", 3))
    assert [a["index"] for a in answers] == [0, 1, 2]
    scores = [a["score"] for a in answers]
    assert scores == sorted(scores, reverse=True)
    assert all(a["cumulative_logprob"] < 0 for a in answers)
    assert 0 < answers[0]["metrics"]["kv_blocks"] <= answers[0]["metrics"]["kv_blocks_unshared"]


def test_beams_as_text_stand_under_their_number(model: Path):
    result = run("generate", model, "-p", "hello", "--beams", 2)
    assert "--- prompt, answer 1\n" in result.stdout
    assert "--- prompt, answer 2\n" in result.stdout


def test_a_length_penalty_changes_the_score(model: Path):
    plain = records(run("generate", model, "-p", "hello", "--json", "--beams", 2, "--length-penalty", 0))
    assert all(a["score"] == a["cumulative_logprob"] for a in plain)


def test_a_length_penalty_without_beams_is_refused(model: Path):
    result = run("generate", model, "-p", "hello", "--length-penalty", 2)
    assert "length_penalty=2.0: needs --beams" in str(result.exception) + result.stderr


@pytest.mark.parametrize(
    "flags",
    [("-n", 2), ("--temperature", 1), ("--stop", "x"), ("--seed", 0), ("--logprobs", 1), ("--guided-regex", "a")],
)
def test_flags_that_mean_nothing_to_beams_are_refused(model: Path, flags: tuple):
    result = run("generate", model, "-p", "hello", "--json", "--beams", 2, *flags)
    assert result.exit_code != 0
    assert flags[0].strip("-").partition("-")[0] in str(result.exception) + result.stderr


# prompts file


def test_prompts_of_a_file_are_answered_in_order(model: Path, tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\nthree\n")
    answers = records(run("generate", model, "--prompts-file", file, "--json"))
    assert [a["prompt"] for a in answers] == [1, 3]
    alone = records(run("generate", model, "-p", "three", "--json"))
    assert answers[1]["token_ids"] == alone[0]["token_ids"]


def test_text_answers_of_a_file_stand_under_the_line_they_answer(model: Path, tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    result = run("generate", model, "--prompts-file", file)
    assert f"--- {file}, line 1\n" in result.stdout
    assert f"--- {file}, line 2\n" in result.stdout


def test_bad_lines_are_told_with_their_number_while_the_others_run(model: Path, tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"good\n" + b"x" * 300 + b"\n\xff\xfe\nalso good\n")
    result = run("generate", model, "--prompts-file", file, "--json")
    assert result.exit_code == 1
    assert [("text" in a, a["prompt"]) for a in records(result)] == [(True, 1), (False, 2), (False, 3), (True, 4)]
    assert [line.partition(", line ")[2][0] for line in result.stderr.splitlines()] == ["2", "3"]
    assert "UTF-8" in result.stderr


# stop, trace


def test_an_answer_stops_before_its_stop_string(model: Path):
    whole = run("generate", model, "-p", "hello").stdout.removesuffix("\n")
    stop = whole[2]
    assert run("generate", model, "-p", "hello", "--stop", stop).stdout == whole[: whole.index(stop)] + "\n"


def test_trace_writes_a_file_that_the_trace_command_draws(model: Path, tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    assert run("generate", model, "-p", "hello", "--trace", file).exit_code == 0
    assert read_trace(file)[1]
    assert "replay agrees" in CliRunner().invoke(app, ["trace", str(file)], env={"COLUMNS": "120"}).stdout

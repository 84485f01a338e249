"""`trace FILE` draws, exports, and says so when the replay differs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm.cli.app import app
from tests.cli_support import TINY, run_requests

COLUMNS = {"COLUMNS": "100"}


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    run_requests(TINY, 16, [(0, list(range(20)), 1, 30), (2, list(range(12)), 2, 4)], trace=path)
    return path


def run(*words: object):
    return CliRunner().invoke(app, ["trace", *map(str, words)], env=COLUMNS)


def test_it_draws_timeline_decisions_and_block_tables(trace_file: Path):
    result = run(trace_file)
    assert result.exit_code == 0
    assert "3 sequences" in result.stdout
    assert "replay agrees" in result.stdout
    for part in ("r1/1", "█", "decisions", "starts from 8 cached tokens", "block tables after step"):
        assert part in result.stdout


def test_a_range_of_steps_can_be_chosen(trace_file: Path):
    assert "steps 5 to 9 of" in run(trace_file, "--steps", "5:9").stdout
    assert "steps 5 to 5 of" in run(trace_file, "--steps", "5").stdout
    assert "steps 1 to 3 of" in run(trace_file, "--steps", ":3").stdout


@pytest.mark.parametrize("steps", ["9:5", "x:y", "999:", "5:-1"])
def test_a_bad_range_names_the_steps_there_are(trace_file: Path, steps: str):
    result = run(trace_file, "--steps", steps)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: steps=")
    assert "1:" in result.stderr


def test_a_long_trace_is_cut_to_the_width_and_says_how_to_go_on(trace_file: Path):
    result = CliRunner().invoke(app, ["trace", str(trace_file)], env={"COLUMNS": "30"})
    assert "the next steps: --steps 23:" in result.stdout


def test_a_trace_that_does_not_replay_is_drawn_and_told(trace_file: Path):
    lines = trace_file.read_text().splitlines()
    scheduled = next(i for i, line in enumerate(lines) if '"scheduled"' in line and '"step":3' in line)
    event = json.loads(lines[scheduled])
    lines[scheduled] = json.dumps(event | {"tokens": event["tokens"] + 1})
    trace_file.write_text("\n".join(lines))
    result = run(trace_file)
    assert result.exit_code == 1
    assert "replay differs" in result.stdout
    assert "replay differs in step 3" in result.stderr


@pytest.mark.parametrize("content", ["", "hello\n", "{}\n"])
def test_a_file_that_is_no_trace_is_one_clear_line(tmp_path: Path, content: str):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    result = run(path)
    assert result.exit_code == 2
    assert "not a minivllm trace" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_file_is_one_clear_line(tmp_path: Path):
    result = run(tmp_path / "none.jsonl")
    assert result.exit_code == 2
    assert "can't be read" in result.stderr


def test_perfetto_writes_a_file_and_draws_nothing(trace_file: Path, tmp_path: Path):
    out = tmp_path / "out.json"
    result = run(trace_file, "--perfetto", out)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "ui.perfetto.dev" in result.stderr
    assert json.loads(out.read_text())["traceEvents"]


def test_perfetto_says_when_it_cannot_write(trace_file: Path, tmp_path: Path):
    result = run(trace_file, "--perfetto", tmp_path / "no" / "out.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: perfetto=")

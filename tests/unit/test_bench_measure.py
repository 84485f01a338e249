"""Measuring: the metrics of each workload, what counts as bookkeeping, and a fresh process; on a tiny model."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm.bench import measure, workloads
from minivllm.bench.first_token import BenchError, measure_process
from minivllm.bench.workloads import Work
from minivllm.cli.app import app
from minivllm.config import EngineConfig
from minivllm.llm import LLM
from tests.cli_support import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, vocab_size=workloads.HIGH_ID + 1, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, EngineConfig(num_kv_blocks=600, dtype="float32"))


def test_a_run_yields_exactly_the_tokens_asked_for(llm: LLM):
    run = measure.run_work(llm, [Work([1000, 1001], 3), Work([2000], 5)])
    assert run.tokens == 8
    assert 0 < run.first <= run.last
    assert 0 < run.bookkeeping.exposed < 1
    assert run.bookkeeping.hidden == 0
    assert run.bookkeeping.step_ms > 0


def test_bookkeeping_is_exposed_while_the_model_rests_and_the_rest_of_it_hidden():
    assert measure.bookkeeping(wall=10, busy=9, host=3, steps=100) == measure.Bookkeeping(0.1, 0.2, 30)
    assert measure.bookkeeping(wall=10, busy=7, host=0, steps=100).hidden == 0


def test_a_run_with_steps_planned_ahead_is_measured_too(model: Path):
    ahead = LLM(model, EngineConfig(num_kv_blocks=600, dtype="float32", async_depth=1))
    run = measure.run_work(ahead, [Work([1000, 1001], 9), Work([2000], 5)])
    assert run.tokens == 14
    assert run.bookkeeping.exposed + run.bookkeeping.hidden < 1


def test_the_stopwatch_leaves_the_engine_as_it_was(llm: LLM):
    core = llm.engine.core
    before = core.runner, core.sampler
    with measure.stopwatch(core):
        assert core.runner is not before[0]
    assert (core.runner, core.sampler) == before


@pytest.mark.parametrize(
    ("workload", "metrics"),
    [
        ("W1", {"ttft_ms", "decode_tok_s"}),
        ("W3", {"cold_s", "warm_s"}),
        ("W3-off", {"off_s"}),
        ("W4", {"prompt_tok_s"}),
    ],
)
def test_each_workload_has_its_metrics(llm: LLM, workload: str, metrics: set[str]):
    assert measure.repetition(llm, workload, 1).metrics.keys() == metrics


def test_the_ragged_batch_reports_tokens_over_wall_time(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workloads, "ragged_batch", lambda rep: [Work([1000], 4), Work([2000], 6)])
    result = measure.repetition(llm, "W2", 1).metrics
    assert result["output_tok_s"] == pytest.approx(10 / result["wall_s"])


def test_a_warm_prefix_is_found_in_the_cache(llm: LLM):
    stats = llm.engine.core.scheduler.kv.stats
    before = stats.hits
    measure.repetition(llm, "W3", 9)
    assert stats.hits - before >= 16 * 1024


def test_json_lines_carry_the_labels_and_only_metrics(model: Path):
    words = ["bench", "-w", "W4", "--reps", "2", "--mode", "fp32", "--model", str(model), "--json"]
    result = CliRunner().invoke(app, [*words, "--kv-cache-memory", "16MiB"])
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["rep"] for line in lines] == [1, 2]
    for line in lines:
        assert line.keys() == {"engine", "mode", "workload", "rep", "prompt_tok_s"}
        assert (line["engine"], line["mode"], line["workload"]) == ("minivllm", "fp32", "W4")
    assert "bookkeeping" in result.stderr


def test_without_json_a_table_is_drawn(model: Path):
    words = ["bench", "-w", "W4", "--reps", "1", "--mode", "fp32", "--model", str(model)]
    result = CliRunner().invoke(app, [*words, "--kv-cache-memory", "16MiB"])
    assert "prompt_tok_s" in result.stdout
    assert "median" in result.stdout


def test_a_process_is_measured_to_its_first_byte_and_its_peak_memory():
    result = measure_process([sys.executable, "-c", "print('x' * 10)"])
    assert result.keys() == {"first_token_s", "peak_rss_mb"}
    assert result["first_token_s"] > 0


@pytest.mark.parametrize("program", ["raise SystemExit('broken')", "pass"])
def test_a_process_that_fails_or_is_silent_is_an_error(program: str):
    with pytest.raises(BenchError, match="ended with"):
        measure_process([sys.executable, "-c", program])

"""What came of drafts, by their position in the row: counted by the scheduler, told by /stats and bench."""

import io
import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from minivllm.bench import measure, workloads
from minivllm.bench.workloads import Work
from minivllm.cli.app import app
from minivllm.cli.chat import Chat
from minivllm.config import EngineConfig
from minivllm.llm import LLM
from minivllm.obs.acceptance import Acceptance
from minivllm.request import SampledToken, SamplingParams
from tests.builders import make_request, make_scheduler, step
from tests.cli_support import write_tiny_model

BY_HAND = Acceptance(Counter({0: 100, 1: 31, 2: 8}), Counter({0: 71, 1: 15}))


def test_shares_are_of_the_drafts_at_each_position():
    assert BY_HAND.shares == [0.71, 15 / 31, 0.0]


def test_positions_are_told_from_1_on():
    assert str(BY_HAND) == "86 of 139 drafts accepted, by position 1: 71%, 2: 48%, 3: 0%"


def test_without_drafts_there_is_no_share_to_tell():
    assert str(Acceptance()) == "no drafts"
    assert Acceptance().shares == []


def test_a_position_where_none_was_accepted_is_a_zero_in_json():
    assert BY_HAND.by_position() == {"drafts_by_position": [100, 31, 8], "accepted_by_position": [71, 15, 0]}


def test_a_repetition_s_counts_are_what_came_since_and_repetitions_add_up():
    more = Acceptance(Counter({0: 2, 1: 2}), Counter({0: 2, 1: 1}))
    assert (BY_HAND + more).by_position()["accepted_by_position"] == [73, 16, 0]
    assert (BY_HAND + more - BY_HAND) == more


def test_the_scheduler_counts_each_row_at_the_positions_it_has_and_keeps():
    """Rows of 3, 3, 2 and 1 drafts that keep 3, 1, 0 and 1 of them: 4, 3 and 2 were run at the positions, 3, 1 and 1 kept."""
    scheduler = make_scheduler(spec_method="ngram")
    request = make_request("r", 3, max_tokens=40)
    scheduler.add(request)
    step(scheduler)
    for drafts, kept in ((3, 3), (3, 1), (2, 0), (1, 1)):
        scheduler.propose(request.sequences[0], [5] * drafts)
        scheduler.update(scheduler.schedule(), [[*[SampledToken(5)] * kept, SampledToken(9)]])
    counted = Acceptance(scheduler.num_drafts, scheduler.num_accepted)
    assert counted.by_position() == {"drafts_by_position": [4, 3, 2], "accepted_by_position": [3, 1, 1]}
    assert str(counted) == "5 of 9 drafts accepted, by position 1: 75%, 2: 33%, 3: 50%"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, vocab_size=workloads.HIGH_ID + 1, max_position_embeddings=1024)


def chat_of(model: Path, **config: object) -> Chat:
    llm = LLM(model, EngineConfig(num_kv_blocks=80, dtype="float32", **config))
    return Chat(llm, SamplingParams(temperature=0, max_tokens=8), Console(file=io.StringIO(), width=120), "")


def stats_of(chat: Chat) -> str:
    chat.show_stats()
    return chat.console.file.getvalue()


def test_stats_tell_what_came_of_drafts(model: Path):
    chat = chat_of(model, spec_method="ngram")
    scheduler = chat.llm.engine.core.scheduler
    scheduler.num_drafts, scheduler.num_accepted = BY_HAND.drafts, BY_HAND.accepted
    assert "speculation   86 of 139 drafts accepted, by position 1: 71%, 2: 48%, 3: 0%" in stats_of(chat)


def test_stats_say_nothing_of_drafts_where_nobody_proposes(model: Path):
    assert "speculation" not in stats_of(chat_of(model))


LOOP = Work([1000, 1001, 1002, 1003] * 8, 24)
"""A prompt that repeats itself: its continuation is looked up from the first step on."""


def test_a_repetition_counts_its_own_drafts_only(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workloads, "single_stream", lambda rep: [LOOP])
    llm = LLM(model, EngineConfig(num_kv_blocks=80, dtype="float32", spec_method="ngram"))
    first, second = (measure.repetition(llm, "W1", rep).acceptance for rep in (0, 1))
    assert first is not None
    assert second is not None
    assert first.drafts
    assert first + second == measure.drafts_so_far(llm)


def bench(model: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[str, str]:
    """What `bench` writes to stdout and stderr about two repetitions of a request that repeats itself."""
    monkeypatch.setattr(workloads, "single_stream", lambda rep: [LOOP])
    words = ["bench", "--reps", "2", "--mode", "fp32", "--model", str(model), "--num-kv-blocks", "80", *more]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr


def test_bench_writes_a_repetition_s_counts_into_its_json_and_tells_the_sum(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    stdout, stderr = bench(model, monkeypatch, "--json", "--spec-method", "ngram")
    lines = [json.loads(line) for line in stdout.splitlines()]
    drafts, accepted = (sum(sum(line[f"{what}_by_position"]) for line in lines) for what in ("drafts", "accepted"))
    assert drafts > 0
    assert f"W1: {accepted} of {drafts} drafts accepted, by position 1: " in stderr


def test_bench_without_speculation_is_silent_about_drafts(model: Path, monkeypatch: pytest.MonkeyPatch):
    stdout, stderr = bench(model, monkeypatch, "--json")
    assert "position" not in stdout + stderr

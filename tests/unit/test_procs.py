"""Real processes: they draw the tokens that one process draws, and none outlives what it is for."""

import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from unittest.mock import Mock

import psutil
import pytest
import torch

from minivllm.config import ConfigError, EngineConfig
from minivllm.engine.procs import under_torchrun
from minivllm.llm import LLM
from minivllm.plan import Row, StepPlan
from minivllm.request import SamplingParams
from minivllm.runner.input_batch import build_input_batch
from minivllm.runner.parallel import LostRankError
from tests.builders import make_request
from tests.cli_support import write_tiny_model

CONFIG = EngineConfig(num_kv_blocks=65, block_size=4, dtype="float64", device="cpu", tensor_parallel_size=2)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["hello", "a longer prompt than the other one", "hello again"]
ARGUMENTS = [
    "-m",
    "minivllm",
    "generate",
    "--prompt",
    "hello",
    "--raw",
    "--max-tokens",
    "8",
    "--num-kv-blocks",
    "65",
]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two KV groups of unlike luck: three KV heads on two ranks."""
    return write_tiny_model(
        tmp_path_factory.mktemp("tiny") / "model", hidden_size=24, num_attention_heads=6, num_key_value_heads=3
    )


def tokens(llm, **options):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, **options)]


def children():
    return multiprocessing.active_children()


@pytest.mark.parametrize("settings", [{}, {"async_depth": 1}, {"max_num_batched_tokens": 8}], ids=str)
def test_two_processes_draw_the_tokens_that_one_draws(model, settings):
    expected = tokens(LLM(model, replace(CONFIG, tensor_parallel_size=1)))
    llm = LLM(model, replace(CONFIG, **settings))
    assert tokens(llm) == expected
    assert tokens(llm) == expected  # from the prefix cache
    assert len(children()) == 1
    del llm
    assert children() == []


def test_a_killed_rank_ends_the_run_with_one_error_that_names_it(model):
    llm = LLM(model, CONFIG)
    rank = children()[0]
    with pytest.raises(LostRankError, match=r"^rank 1 of 2 has ended with exit code -9 \(SIGKILL\)"):
        tokens(llm, on_step=lambda done, total: rank.kill())
    assert children() == []
    with pytest.raises(LostRankError, match="rank 1 of 2"):
        tokens(llm)


def run_until_all_have_left(program, *arguments):
    """What it wrote, once it and all processes that it started have ended: they all hold the pipe. If they don't, they
    are killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", program, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


@pytest.mark.parametrize(("point", "size"), [("spawned", 2), ("meeting", 2), ("loading", 2), ("step", 2), ("step", 3)])
def test_a_stopped_rank_ends_the_run_with_one_error_that_names_it_and_leaves_no_process(model, point, size):
    """Stopped, not killed: none of its connections breaks. At three ranks the third gives up, too, and isn't blamed."""
    said, logged = run_until_all_have_left("tests.stopped_rank", point, str(size), str(model))
    assert re.fullmatch(r".* of tensor parallelism .*, rank 1 is stopped; start the engine again\n", said)
    assert "Traceback" not in logged


def test_a_stopped_rank_keeps_nobody_from_leaving(model):
    assert run_until_all_have_left("tests.stopped_rank", "idle", "2", str(model)) == ("", "")


def test_after_a_lost_rank_a_new_engine_can_start_and_outlives_the_old_one(model):
    old = LLM(model, CONFIG)
    children()[0].kill()
    with pytest.raises(LostRankError):
        tokens(old)
    new = LLM(model, CONFIG)
    del old
    assert tokens(new)


def test_a_failed_start_leaves_no_process(model):
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(model, replace(CONFIG, max_model_len=10**6))
    assert children() == []


def test_a_rank_that_dies_before_it_can_begin_is_named(model, monkeypatch):
    start = SpawnProcess.start
    monkeypatch.setattr(SpawnProcess, "start", lambda process: (start(process), process.kill()))
    with pytest.raises(LostRankError, match=r"^rank 1 of 2 has ended with exit code -9 \(SIGKILL\)"):
        LLM(model, CONFIG)
    assert children() == []


def test_after_a_start_that_failed_on_the_way_into_the_group_another_can_succeed(model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.new_group", Mock(side_effect=RuntimeError("no way")))
        with pytest.raises(LostRankError, match="no way"):
            LLM(model, CONFIG)
    assert children() == []
    assert tokens(LLM(model, CONFIG))


def test_a_size_that_the_model_can_t_have_is_refused_before_any_process_starts(model):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4: .* use 1, 2, 3, 6$"):
        LLM(model, replace(CONFIG, tensor_parallel_size=4))


def test_a_second_engine_with_ranks_is_refused_while_the_first_lives(model):
    llm = LLM(model, CONFIG)
    with pytest.raises(ConfigError, match="one engine a process"):
        LLM(model, CONFIG)
    assert tokens(llm)


def run_command(model, *launcher):
    command = [*launcher, *ARGUMENTS, "--model", str(model), "--dtype", "float32"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


def test_the_same_command_runs_under_torchrun(model):
    if (torchrun := shutil.which("torchrun", path=os.path.dirname(sys.executable))) is None:
        pytest.skip("torchrun is not installed")
    alone, together = run_command(model, sys.executable), run_command(model, torchrun, "--nproc-per-node", "2")
    assert (alone.returncode, together.returncode) == (0, 0), together.stderr
    assert together.stdout == alone.stdout


def start_command(model, *more):
    command = [sys.executable, *ARGUMENTS, "--model", str(model), "--dtype", "float32", "--tp", "2", *more]
    return subprocess.Popen(
        [*command, "--max-model-len", "250"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True,
    )  # fmt: skip


def family_once_it_answers(process):
    assert process.stdout.read(1)
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl_c", "kill_9"])
def test_nothing_outlives_a_command_that_is_ended(model, number):
    process = start_command(model, "--max-tokens", "240")
    family = family_once_it_answers(process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert len(gone) >= 1
    assert alive == []
    assert process.returncode != 0
    assert "Traceback" not in errors


def test_torchrun_s_number_of_processes_is_the_size(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert under_torchrun(EngineConfig()).tensor_parallel_size == 4
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: torchrun has started 4"):
        under_torchrun(EngineConfig(tensor_parallel_size=2))


def test_a_step_s_inputs_survive_the_journey_to_another_process():
    request = make_request("r0", 6)
    batch = build_input_batch(StepPlan(0, [Row(request.sequences[0], 0, 6, [3, 1])]), block_size=4)
    arrived = pickle.loads(pickle.dumps(batch))
    assert torch.equal(arrived.slot_mapping, batch.slot_mapping)
    assert arrived.context_lengths == batch.context_lengths


@pytest.mark.model
def test_the_default_model_on_two_ranks_draws_the_tokens_of_one():
    """Nine heads and three KV heads: two groups at rank 0, one at rank 1. float32: in bfloat16 each rank's part is
    rounded before the sum, which decides between words that are nearly as likely."""
    config = EngineConfig(num_kv_blocks=65, dtype="float32", device="cpu")
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = ["The capital of France is", "Explain why the sky is blue."]
    one, two = (
        [
            output.outputs[0].token_ids
            for output in LLM(None, replace(config, tensor_parallel_size=n)).generate(prompts, params)
        ]
        for n in (1, 2)
    )
    assert two == one

"""Decode steps replayed as CUDA graphs give what the same steps give kernel by kernel: on a GPU, by a tiny model.

The interpreter is asked for in this folder, so the GPU's part runs in a process without it. What it compares with is tried
on the CPU as well, where graphs don't capture.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton isn't installed")

from minivllm.config import EngineConfig, ModelConfig
from minivllm.models.decoder import Decoder
from minivllm.runner.cuda_graphs import padding_rows
from minivllm.runner.input_batch import InputBatch
from minivllm.runner.model_runner import ModelRunner
from tests.random_weights import random_weights

MODEL = ModelConfig(
    "llama", vocab_size=50, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=64,
)  # fmt: skip
BLOCK, WIDTH, MOST = 4, 4, 5
"""Slots of a block, blocks of a row, rows of a step."""
STEPS = 5
NEAR = 1e-3
ROOT = Path(__file__).parents[2]


def make_runner(device: str, eager: bool) -> ModelRunner:
    config = EngineConfig(
        block_size=BLOCK, attention_backend="triton", max_num_seqs=MOST, enforce_eager=eager, device=device
    )
    model = Decoder(MODEL, random_weights(MODEL), dtype=torch.float32, device=device)
    return ModelRunner(model, config, 1 + MOST * WIDTH)


def fill(runner: ModelRunner) -> None:
    """Numbers in all blocks, the same in every runner, so that steps have a past."""
    generator = torch.Generator().manual_seed(0)
    for pages in runner.cache.layers:
        pages.copy_(torch.randn(pages.shape, generator=generator))


def decode_batch(tokens: torch.Tensor, step: int) -> InputBatch:
    """The rows' next token each, their lengths being 5 + step, 6 + step..."""
    rows = len(tokens)
    row, length = torch.arange(rows), torch.arange(rows) + 5 + step
    tables = 1 + torch.arange(rows * WIDTH).view(rows, WIDTH)
    return replace(
        padding_rows(rows, WIDTH, BLOCK, None, torch.device("cpu")),
        token_ids=tokens,
        positions=length - 1,
        lengths=length,
        block_tables=tables,
        slot_mapping=tables[row, (length - 1) // BLOCK] * BLOCK + (length - 1) % BLOCK,
        logits_indices=row,
        starts=tuple((length - 1).tolist()),
        context_lengths=tuple(length.tolist()),
    )


def prove_replayed(runner: ModelRunner) -> None:
    """Fail from now on where a step isn't replayed."""
    assert runner.graphs is not None
    replay = runner.graphs.run

    def run(batches):
        result = replay(batches)
        assert result is not None, "a step wasn't replayed"
        return result

    runner.graphs.run = run


def compare(eager: ModelRunner, replayed: ModelRunner) -> None:
    """Raise `AssertionError` unless steps of every number of rows give the same tokens, logits, and K and V."""
    prove_replayed(replayed)
    device = eager.model.device
    for rows in range(1, MOST + 1):
        fill(eager)
        fill(replayed)
        tokens = torch.arange(rows) + 7
        for step in range(STEPS):
            batch = decode_batch(tokens, step).to(device)
            wanted = eager.run(([], [], []), [batch]).logits.cpu()
            got = replayed.run(([], [], []), [batch]).logits.cpu()
            best, second = wanted.topk(2).values.T
            assert (best - second > 2 * NEAR).all(), "a near tie: no verdict possible"
            torch.testing.assert_close(got, wanted, rtol=NEAR, atol=NEAR)
            tokens = wanted.argmax(1)
            assert torch.equal(got.argmax(1), tokens)
        for mine, theirs in zip(replayed.cache.layers, eager.cache.layers, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=NEAR, atol=NEAR)


def compare_on_the_gpu() -> None:
    compare(make_runner("cuda", eager=True), make_runner("cuda", eager=False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to capture CUDA graphs on")
def test_replayed_steps_give_what_eager_steps_give():
    done = subprocess.run(
        [sys.executable, "-c", "from tests.kernels import test_cuda_graphs_gpu as t; t.compare_on_the_gpu()"],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def with_graphs(capture) -> ModelRunner:
    runner = make_runner("cpu", eager=True)
    runner.capture_graphs(MOST, capture)
    return runner


def test_the_comparison_passes_where_a_replay_runs_the_step_again():
    compare(make_runner("cpu", eager=True), with_graphs(lambda run: run))


def test_the_comparison_fails_where_a_replay_does_not_read_the_step():
    def stale(run):
        result = run()
        return lambda: result

    with pytest.raises(AssertionError, match="not close"):
        compare(make_runner("cpu", eager=True), with_graphs(stale))


def test_the_comparison_fails_where_steps_are_not_replayed():
    runner = with_graphs(lambda run: run)
    runner.graphs.replays.clear()
    with pytest.raises(AssertionError, match="wasn't replayed"):
        compare(make_runner("cpu", eager=True), runner)

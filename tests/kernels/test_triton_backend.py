"""The whole engine on Triton's kernels, in the interpreter; and decode steps padded as a CUDA graph would replay them."""

import logging
import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton isn't installed")

from minivllm.config import ConfigError, EngineConfig
from minivllm.models.decoder import Decoder
from minivllm.runner import attention
from minivllm.runner.attention import layer_ops, pick_backend
from minivllm.runner.cuda_graphs import MOST_ROWS, DecodeGraphs, bucket_sizes, first_rows, padding_rows, why_eager
from minivllm.runner.model_runner import ModelRunner
from minivllm_kernels.gpu import ops
from tests.props.test_lattice_decoder import MODEL, expected, say, weights_of
from tests.props.test_lattice_hybrid_decoder import MODELS, DecoderCell, decoder_cells, prove

CPU = torch.device("cpu")


class TritonCell(DecoderCell):
    """A cell on Triton's kernels."""

    backend = "triton"


def some_cells(model):
    """A roomy one without chunks and a tight one with them: preemption, prefix hits, forks, windows."""
    cells = [cell for cell in decoder_cells(model, TritonCell) if cell.caching and cell.hybrid == "on"]
    return [cell for cell in cells if (cell.budget == 7) == cell.tight]


CELLS = [
    (name, model, cell)
    for name, model in {
        "full": MODEL,
        "alternating": MODELS["alternating"],
        "all sliding": MODELS["all sliding"],
    }.items()
    for cell in some_cells(model)
]
CELLS = [pytest.param(model, cell, id=f"{name}-{cell}") for name, model, cell in CELLS]


@pytest.mark.parametrize(("model", "cell"), CELLS)
def test_the_engine_says_the_same_on_tritons_kernels(model, cell):
    runners = []
    assert say(cell, model, runners.append, prove, dtype=torch.float32) == expected(model)
    (runner,) = runners
    assert type(runner.attention).__name__ == "TritonAttention"
    assert runner.ops is ops


def runner_in_float32():
    decoder = Decoder(MODEL, {n: w.float() for n, w in weights_of(MODEL).items()}, dtype=torch.float32, device="cpu")
    return ModelRunner(decoder, EngineConfig(block_size=4, attention_backend="triton"), 17)


def decode_step(rows):
    """A step of rows that each have a few tokens in blocks of 4 and run one."""
    batch = first_rows(padding_rows(rows, 3, 4, None, CPU), rows)
    length = torch.arange(rows) + 5
    tables = 1 + torch.arange(rows * 3).view(rows, 3)
    return replace(
        batch,
        token_ids=torch.arange(rows) + 7,
        positions=length - 1,
        lengths=length,
        block_tables=tables,
        slot_mapping=tables[torch.arange(rows), (length - 1) // 4] * 4 + (length - 1) % 4,
        logits_indices=torch.arange(rows),
        starts=tuple((length - 1).tolist()),
        context_lengths=tuple(length.tolist()),
    )


def test_every_norm_of_a_step_runs_on_the_kernels(monkeypatch):
    fused, plain = [], []
    for name, calls in (("add_rms_norm", fused), ("rms_norm", plain)):
        kernel = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *x, calls=calls, kernel=kernel: calls.append(x) or kernel(*x))
    runner_in_float32().run(([], [], []), [decode_step(2)])
    assert (len(fused), len(plain)) == (MODEL.num_layers, MODEL.num_layers + 1)


# decode steps as CUDA graphs replay them


class Padded:
    """Gives a runner graphs that don't capture, and fills the null block, which padding's tables point to, with NaN."""

    def __call__(self, runner):
        self.runner, self.replayed = runner, 0
        runner.capture_graphs(4, lambda run: lambda: self.count(run()))
        self.replayed = 0
        for pages in runner.cache.layers:
            pages[:, : runner.block_size] = math.nan

    def count(self, result):
        self.replayed += 1
        return result


@pytest.mark.parametrize(("model", "cell"), CELLS[:4])
def test_padded_decode_steps_say_the_same_and_write_nowhere_else(model, cell):
    padded = Padded()
    assert say(cell, model, padded, prove, dtype=torch.float32) == expected(model)
    assert padded.replayed > 3
    assert all(pages[:, : padded.runner.block_size].isnan().all() for pages in padded.runner.cache.layers)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_padded_step_gives_its_rows_the_same_numbers_and_stores_the_same(rows):
    plain, padded = runner_in_float32(), runner_in_float32()
    Padded()(padded)
    for runner in (plain, padded):
        torch.manual_seed(0)
        for pages in runner.cache.layers:
            pages[:, 4:] = torch.randn_like(pages[:, 4:])
    batch = decode_step(rows)
    torch.testing.assert_close(
        padded.run(([], [], []), [batch]).logits, plain.run(([], [], []), [batch]).logits, rtol=0, atol=0
    )
    for mine, theirs in zip(padded.cache.layers, plain.cache.layers, strict=True):
        assert torch.equal(mine[:, 4:], theirs[:, 4:])


def test_a_graph_is_captured_after_a_run_and_replayed_where_its_result_lies(monkeypatch):
    events, results = [], iter(torch.arange(2))

    class Graph:
        def replay(self):
            events.append("replay")

    @contextmanager
    def capture(graph, pool):
        assert isinstance(graph, Graph)
        events.append(f"capture in {pool}")
        yield
        events.append("captured")

    def run():
        events.append("run")
        return next(results)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    replay = ops.cuda_graph(run, "the pool")
    assert events == ["run", "capture in the pool", "run", "captured"]
    first, second = replay(), replay()
    assert events[4:] == ["replay", "replay"]
    assert first is second
    assert first == 1, "the result of the run that was captured"


def graphs(rows=8, width=3):
    return DecodeGraphs(lambda batches: batches[0].token_ids, [None], rows, width, 4, CPU, lambda run: run)


def step(rows, width=3, tokens=None):
    """A step of `rows` rows, of one token each unless `tokens` says how many there are."""
    batch = padding_rows(rows, width, 4, None, CPU)
    return [replace(batch, token_ids=torch.arange(tokens or rows) + 1, block_tables=batch.block_tables + 2)]


@torch.inference_mode()
def test_only_steps_that_fit_a_graph_are_replayed():
    assert graphs().run(step(3)).tolist() == [1, 2, 3]
    assert graphs().run(step(9)) is None, "more rows than were captured"
    assert graphs().run(step(2, tokens=5)) is None, "a row has several tokens"
    assert graphs().run(step(2, width=4)) is None, "a table is longer than a buffer's"


@torch.inference_mode()
def test_what_an_earlier_step_left_is_overwritten():
    made = graphs()
    made.run(step(4))
    made.run(step(3, width=2))
    buffer = first_rows(made.buffers[0], 4)
    assert buffer.token_ids.tolist() == [1, 2, 3, 0]
    assert buffer.slot_mapping.tolist()[-1] == -1
    assert buffer.block_tables[-1].tolist() == [0, 0, 0]


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_buckets_hold_every_number_of_rows_and_waste_few(most, rows):
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes))
    if rows <= min(most, MOST_ROWS):
        size = min(size for size in sizes if size >= rows)
        assert size < rows + 8
        assert size <= 2 * rows


def test_why_decode_steps_are_not_captured():
    cuda, plain = torch.device("cuda"), EngineConfig()
    assert why_eager(plain, "triton", cuda) is None
    assert "Triton" in why_eager(plain, "torch", cuda)
    assert "Triton" in why_eager(plain, "triton", CPU)
    assert "sums" in why_eager(EngineConfig(tensor_parallel_size=2), "triton", cuda)
    assert "enforce_eager" in why_eager(EngineConfig(enforce_eager=True), "triton", cuda)


# which backend, and why


class Model:
    """What `pick_backend` asks of a model."""

    def __init__(self, dtype=torch.float32, head_dim=64, hidden_size=64, device="cpu"):
        self.dtype, self.device = dtype, torch.device(device)
        self.config = replace(MODEL, head_dim=head_dim, hidden_size=hidden_size)


@pytest.fixture(autouse=True)
def nothing_said_yet():
    attention.log_fallback.cache_clear()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Model(torch.float64), "dtype torch.float64"),
        (Model(head_dim=7), "head size 7"),
        (Model(head_dim=512), "head size 512"),
        (Model(hidden_size=20000), "hidden size 20000"),
        (Model(device="meta"), "runs on meta"),
    ],
)
def test_a_model_that_the_kernels_cannot_run_is_refused_with_the_reason(model, reason):
    with pytest.raises(ConfigError, match=f"attention_backend='triton': can't be had: .*{reason}"):
        pick_backend("triton", model.device.type, model)


@pytest.mark.parametrize(
    ("device", "interpreter", "reason"),
    [
        ("cpu", False, "TRITON_INTERPRET=1"),
        ("cuda", True, "unset it"),
        ("cpu", True, None),
        ("xpu", False, "runs on xpu"),
    ],
)
def test_the_interpreter_is_for_cpus_and_for_nothing_else(device, interpreter, reason):
    said = ops.wrong_mode(device, interpreter)
    assert said is None if reason is None else reason in said


def test_an_old_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "7.5, they need 8.0" in ops.wrong_mode("cuda", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert ops.wrong_mode("cuda", False) is None


def test_a_kernel_that_fails_on_trial_is_a_reason(monkeypatch):
    def no_compiler(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(ops, "gated_silu", no_compiler)
    assert ops.trial("cpu") == "a trial kernel failed (RuntimeError: Failed to find C compiler)"


def test_no_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: None)
    assert "isn't installed" in ops.why_not.__wrapped__("cuda")


def test_on_a_gpu_triton_is_the_default(monkeypatch):
    monkeypatch.setattr(ops, "why_not", lambda device: None)
    assert pick_backend("auto", "cuda", Model()) == ("triton", "the fastest on cuda")
    assert layer_ops("triton") is ops


def test_a_fallback_on_a_gpu_warns_once_and_is_told(monkeypatch, caplog):
    monkeypatch.setattr(ops, "why_not", lambda device: "the driver is too old")
    for _ in range(2):
        assert str(pick_backend("auto", "cuda", Model())) == "torch (no triton: the driver is too old)"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the driver is too old" in record.message

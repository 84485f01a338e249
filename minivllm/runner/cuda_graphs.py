"""Decode steps replayed as CUDA graphs: a small model's kernels are over before the CPU has launched the next ones.

A graph replays kernels with the addresses and sizes that they had when it was captured. So there is one for each of a few
numbers of rows, a step's inputs are copied to where the graphs read them, and rows that are missing are padding: stored
nowhere, of length 0. Only steps in which each row has one token are replayed: their kernels read all else from tensors.

Captured as vLLM 0.32 does, `v1/worker/gpu/cudagraph_utils.py`: the largest first, over one pool of memory. Copies, padding
and the padded forward are tested on a CPU; capture and replay have never run on a GPU here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from minivllm.config import EngineConfig
from minivllm.runner.input_batch import InputBatch

MOST_ROWS = 512
STEP = 8
PADDING = {"token_ids": 0, "positions": 0, "slot_mapping": -1, "lengths": 0, "block_tables": 0}
"""What the buffers hold for a row that isn't there. Block 0 belongs to nobody."""

Forward = Callable[[list[InputBatch]], Tensor]
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def why_eager(config: EngineConfig, backend: str, device: torch.device) -> str | None:
    """Why decode steps aren't captured; None if they are."""
    if backend != "triton" or device.type != "cuda":
        return "only Triton's kernels on a GPU are"
    if config.tensor_parallel_size > 1:
        return "sums between processes aren't"
    return "enforce_eager is set" if config.enforce_eager else None


def bucket_sizes(most: int) -> list[int]:
    """Numbers of rows to capture, ascending: 1, 2, 4, then every eighth up to the first that holds `most`, or 512."""
    most = min(most, MOST_ROWS)
    sizes = [1, 2, 4, *range(STEP, most + STEP, STEP)]
    return [size for size, smaller in zip(sizes, [0, *sizes], strict=False) if smaller < most]


class DecodeGraphs:
    """The buffers, and a replay for each of `bucket_sizes`. `forward` is captured, with inputs that are all padding.

    `windows` are those of the model's views (`model_runner.layer_views`), `width` the blocks of the longest table.
    `capture` makes of a function one that does the same again: `gpu.ops.cuda_graph`, or in tests the function itself.
    """

    @torch.inference_mode()
    def __init__(
        self, forward: Forward, windows: list[int | None], rows: int, width: int, block_size: int,
        device: torch.device, capture: Capture,
    ) -> None:  # fmt: skip
        sizes, self.width = bucket_sizes(rows), width
        self.buffers = [padding_rows(sizes[-1], width, block_size, window, device) for window in windows]
        self.replays: dict[int, Callable[[], Tensor]] = {}
        for size in reversed(sizes):
            batches = [first_rows(buffer, size) for buffer in self.buffers]
            self.replays[size] = capture(partial(forward, batches))

    def run(self, batches: list[InputBatch]) -> Tensor | None:
        """What `forward` returns for a step, [T, hidden_size], until the next one; None if no graph fits the step."""
        rows, tokens = len(batches[0].lengths), len(batches[0].token_ids)
        size = min((size for size in self.replays if size >= rows), default=0)
        too_wide = max(batch.block_tables.shape[1] for batch in batches) > self.width
        if rows < tokens or not size or too_wide:
            return None
        for buffer, batch in zip(self.buffers, batches, strict=True):
            copy_in(buffer, batch, size)
        return self.replays[size]()[:rows]


def padding_rows(rows: int, width: int, block_size: int, window: int | None, device: torch.device) -> InputBatch:
    """A step of nothing but padding, for layers with a window."""
    shapes = {name: (rows, width) if name == "block_tables" else (rows,) for name in PADDING}
    tensors = {name: torch.full(shape, PADDING[name], device=device) for name, shape in shapes.items()}
    zeros, no_logits = (0,) * rows, torch.empty(0, dtype=torch.int64, device=device)
    return InputBatch(
        **tensors, query_starts=tuple(range(rows + 1)), starts=zeros, context_lengths=zeros, logits_indices=no_logits,
        prompt_rows=(), block_size=block_size, window=window,
    )  # fmt: skip


def first_rows(batch: InputBatch, rows: int) -> InputBatch:
    """The first rows of a step of rows of one token, in the same memory."""
    return replace(batch, query_starts=batch.query_starts[: rows + 1], **{n: getattr(batch, n)[:rows] for n in PADDING})


def copy_in(buffer: InputBatch, batch: InputBatch, size: int) -> None:
    """Put a step's rows into a buffer of which `size` rows will run; those after the step's become padding."""
    rows = len(batch.lengths)
    for name, blank in PADDING.items():
        source, target = getattr(batch, name), getattr(buffer, name)
        target[:rows][..., : source.shape[-1]] = source
        target[rows:size] = blank

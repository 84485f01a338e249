"""Runs a step plan: block copies, flat inputs, forward, logits."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from minivllm.config import EngineConfig
from minivllm.kv.hybrid import LayerGroup, Windows, form_groups
from minivllm.models.decoder import Attention, Decoder, resolve_device
from minivllm.plan import Moves, StepPlan
from minivllm.runner.attention import BACKENDS, layer_ops, pick_backend
from minivllm.runner.cuda_graphs import Capture, DecodeGraphs, why_eager
from minivllm.runner.host import keep_freed_memory
from minivllm.runner.input_batch import InputBatch, build_input_batch
from minivllm.runner.kv_cache import KVCache
from minivllm_kernels.gpu.ops import cuda_graph

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits of a step, float32 (float64 in a float64 model).

    `logits` [R, vocab_size] has one row for each plan row with samples, in plan order, and one for each of its drafts.
    `prompt_logits` maps the index of a plan row whose request wants prompt log-probabilities to [num_tokens, vocab_size],
    one row a token run.
    """

    logits: Tensor
    prompt_logits: dict[int, Tensor] = field(default_factory=dict)


class ModelRunner:
    """Owns the KV cache's tensors and turns plans into logits. Decides nothing: the plan says what runs where."""

    def __init__(self, model: Decoder, config: EngineConfig, num_blocks: int) -> None:
        if model.device.type == "cpu":
            keep_freed_memory()
        self.model = model
        self.block_size = config.block_size
        groups = form_groups(model.config.windows, config.hybrid)
        self.views, self.places = layer_views(model.config.windows, groups)
        num_pages = max(len(group.layers) for group in groups)
        self.cache = KVCache(
            model.config, num_blocks, config.block_size, model.dtype, model.device, num_pages, config.host_kv_blocks
        )
        self.backend = pick_backend(config.attention_backend, model.device.type, model)
        self.attention = BACKENDS[self.backend.name](self.cache)
        self.ops = layer_ops(self.backend.name)
        self.graphs: DecodeGraphs | None = None
        if eager := why_eager(config, self.backend.name, model.device):
            log.info("decode steps run kernel by kernel, not as CUDA graphs: %s", eager)
        else:
            self.capture_graphs(config.max_num_seqs, partial(cuda_graph, pool=torch.cuda.graph_pool_handle()))

    def capture_graphs(self, rows: int, capture: Capture) -> None:
        """Replay decode steps of up to so many rows, of tables as long as the model's positions or the whole cache."""
        blocks = self.cache.num_slots // self.block_size
        width = min(-(-self.model.config.max_position // self.block_size), blocks)
        windows = [window for _, window in self.views]
        self.graphs = DecodeGraphs(self._forward, windows, rows, width, self.block_size, self.model.device, capture)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan's rows. The plan must have at least one row."""
        return self.run(plan.moves, self.input_batches(plan, self.model.device))

    def input_batches(self, plan: StepPlan, device: torch.device | str) -> list[InputBatch]:
        """The plan's rows as the layers of each view see them."""
        return [build_input_batch(plan, self.block_size, device, *view) for view in self.views]

    @torch.inference_mode()
    def run(self, moves: Moves, batches: list[InputBatch]) -> StepResult:
        """Move blocks as `StepPlan.moves` says, then run `input_batches`."""
        cache = self.cache
        for move, pairs in zip((cache.store_blocks, cache.load_blocks, cache.copy_blocks), moves, strict=True):
            if pairs:
                move(pairs)
        batch = batches[0]
        replayed = self.graphs.run(batches) if self.graphs else None
        hidden = self._forward(batches) if replayed is None else replayed
        logits = self.model.logits(hidden.index_select(0, batch.logits_indices), self.ops)
        return StepResult(logits, self._prompt_logits(hidden, batch))

    def _forward(self, batches: list[InputBatch]) -> Tensor:
        """Residual stream [T, hidden_size] of a step."""
        batch = batches[0]
        return self.model.forward(batch.token_ids, batch.positions, self._attention(batches), self.ops)

    def _attention(self, batches: list[InputBatch]) -> Attention:
        """What the decoder calls: each layer attends in its own view of the step, on its own page of the blocks."""
        attends = [self.attention.prepare(batch) for batch in batches]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            view, page = self.places[layer]
            return attends[view](page, q, k, v)

        return attend if len(attends) > 1 else attends[0]

    def _prompt_logits(self, hidden: Tensor, batch: InputBatch) -> dict[int, Tensor]:
        spans = {row: slice(*batch.query_starts[row : row + 2]) for row in batch.prompt_rows}
        return {row: self.model.logits(hidden[span], self.ops) for row, span in spans.items()}


View = tuple[int, int | None]
"""Layer group and window: what the layers of a model differ in. With `hybrid` off, one group has layers of both kinds."""


def layer_views(windows: Windows, groups: list[LayerGroup]) -> tuple[list[View], list[tuple[int, int]]]:
    """The distinct views of a model's layers; and for each layer which view it has, and which page within its group."""
    pages = {layer: (g, page) for g, group in enumerate(groups) for page, layer in enumerate(group.layers)}
    own = [(pages[layer][0], window) for layer, window in enumerate(windows)]
    views = list(dict.fromkeys(own))
    return views, [(views.index(view), pages[layer][1]) for layer, view in enumerate(own)]


def default_dtype(device: str | torch.device = "auto") -> torch.dtype:
    """bfloat16 where the hardware multiplies it (GPUs; CPUs with AVX512-BF16 or AMX), else float32."""
    if resolve_device(device).type == "cuda" or torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32


def pick_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype of weights, activations and KV cache that the configuration asks for."""
    return default_dtype(config.device) if config.dtype == "auto" else getattr(torch, config.dtype)

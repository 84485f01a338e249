"""Attention for models whose layers differ: each reads and writes through its group's block tables, with its own window."""

from __future__ import annotations

from torch import Tensor

from minivllm.kv.hybrid import LayerGroup, Windows
from minivllm.models.decoder import Attention
from minivllm.plan import StepPlan
from minivllm.runner.attention import AttentionBackend
from minivllm.runner.input_batch import InputBatch, pad_block_tables, view_through


class LayerViews:
    """What the layers of a model see of a step: one view for each pair of layer group and window.

    With `hybrid` off there is one group, whose layers still have their windows: they attend to as little, and keep more.
    """

    def __init__(self, windows: Windows, groups: list[LayerGroup]) -> None:
        pages = {layer: (g, page) for g, group in enumerate(groups) for page, layer in enumerate(group.layers)}
        views = {layer: (group, windows[layer]) for layer, (group, _) in pages.items()}
        self.views = list(dict.fromkeys(views.values()))
        self.places = [(self.views.index(views[layer]), pages[layer][1]) for layer in range(len(windows))]

    def prepare(self, backend: AttentionBackend, batch: InputBatch, plan: StepPlan) -> Attention:
        """What the decoder calls: `backend` prepared once a view, and for each layer the view and page that are its own."""
        by_group = zip(*[(row.block_ids, *row.more_block_ids) for row in plan.rows], strict=True)
        tables = [pad_block_tables(of_group) for of_group in by_group]
        attends = [backend.prepare(view_through(batch, tables[group], window)) for group, window in self.views]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            view, page = self.places[layer]
            return attends[view](page, q, k, v)

        return attend

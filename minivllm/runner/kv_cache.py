"""The KV cache: one tensor a layer, its slots numbered through all blocks."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from minivllm.config import ModelConfig


class KVCache:
    """K and V of every layer: `layers[i]` is [num_slots, 2, Hkv, D], K first; slot = block * block_size + offset.

    Nothing is cleared: memory is taken when first written, and what a slot held before is never read (attention reads
    only slots that the row's context covers).
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = block_size
        shape = (num_blocks * block_size, 2, config.num_kv_heads, config.head_dim)
        self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, Hkv, D] at slots int64 [T]."""
        cache = self.layers[layer]
        cache[:, 0].index_copy_(0, slots, k)
        cache[:, 1].index_copy_(0, slots, v)

    def copy_blocks(self, pairs: Many[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in all layers; every source is read before any destination is written."""
        if not pairs:
            return
        source, destination = torch.tensor(pairs, device=self.layers[0].device).unbind(1)
        for layer in self.layers:
            blocks = layer.view(-1, self.block_size, *layer.shape[1:])
            blocks.index_copy_(0, destination, blocks.index_select(0, source))

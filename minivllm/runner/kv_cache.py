"""The KV cache: one tensor a layer, its slots numbered through all blocks."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from minivllm.config import ModelConfig


class KVCache:
    """K and V of every layer: `layers[i]` is [2 * Hkv, num_slots, D], the K heads first; slot = block * block_size + offset.

    Heads stand outside, so that one head's gathered past is a plain matrix [S, D] and attention a plain matrix product.
    A vector is found by its row, plane * num_slots + slot, plane being the K or V head; rows of a step are the same
    in all layers and computed once. Nothing is cleared: memory is taken when first written, and what a slot held before
    is never read (attention reads only slots that the row's context covers).
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.block_size, self.num_slots = block_size, num_blocks * block_size
        shape = (2 * self.num_kv_heads, self.num_slots, self.head_dim)
        self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self._planes = torch.arange(2 * self.num_kv_heads, device=device) * self.num_slots

    def rows_to_write(self, slots: Tensor) -> Tensor:
        """Rows of `slots` int64 [T], token by token: int64 [T * 2 * Hkv], for `write`."""
        return (slots[:, None] + self._planes).flatten()

    def rows_to_read(self, slots: Tensor) -> Tensor:
        """Rows of `slots` int64 [N], plane by plane: int64 [2 * Hkv * N], for `read`."""
        return (self._planes[:, None] + slots).flatten()

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, Hkv, D] at `rows_to_write`."""
        vectors = torch.cat((k, v), 1).view(-1, self.head_dim)
        self.layers[layer].view(-1, self.head_dim).index_copy_(0, rows, vectors)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at `rows_to_read` of N slots, each [Hkv, N, D]."""
        vectors = self.layers[layer].view(-1, self.head_dim).index_select(0, rows)
        k, v = vectors.view(2, self.num_kv_heads, -1, self.head_dim).unbind()
        return k, v

    def copy_blocks(self, pairs: Many[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in all layers; every source is read before any destination is written."""
        if not pairs:
            return
        source, destination = torch.tensor(pairs, device=self._planes.device).unbind(1)
        for layer in self.layers:
            blocks = layer.view(len(layer), -1, self.block_size * self.head_dim)
            blocks.index_copy_(1, destination, blocks.index_select(1, source))

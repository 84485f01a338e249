"""The KV cache: one tensor a layer, its slots numbered through all blocks; and host memory for blocks that are kept."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from minivllm.config import ModelConfig


class KVCache:
    """K and V of every layer: `layers[i]` is [2 * Hkv, num_slots, D], the K heads first; slot = block * block_size + offset.
    With `num_pages`, layer groups share these many tensors: layer i of each group uses `layers[i]` (`kv/hybrid.py`).

    Heads stand outside, so that one head's gathered past is a plain matrix [S, D] and attention a plain matrix product;
    within a head, a block is one run of memory, so that it's gathered as one. Where a step reads and writes is the same
    in all layers and computed once. Nothing is cleared: memory is taken when first written, and what a slot outside a
    row's context holds may be anything, NaN too.

    `host` is [host_blocks, layers, 2 * Hkv, block_size * D], pinned beside a GPU: a block there is one run of memory, because
    links are slow at small copies.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_pages: int | None = None,
        host_blocks: int = 0,
    ) -> None:
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.block_size, self.num_slots = block_size, num_blocks * block_size
        shape = (2 * self.num_kv_heads, self.num_slots, self.head_dim)
        self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_pages or config.num_layers)]
        host_shape = (host_blocks, len(self.layers), 2 * self.num_kv_heads, block_size * self.head_dim)
        pinned = self.layers[0].is_cuda and host_blocks > 0
        self.host = torch.empty(host_shape, dtype=dtype, pin_memory=pinned)
        self._planes = torch.arange(2 * self.num_kv_heads, device=device)[:, None]
        self._scratch = self.layers[0].new_empty(0)

    def rows_to_write(self, slots: Tensor) -> Tensor:
        """Where `write` puts slots int64 [T]: an index int64 [T * 2 * Hkv] of vectors [D], token by token."""
        return (self._planes * self.num_slots + slots).T.flatten()

    def runs_to_read(self, blocks: Tensor) -> Tensor:
        """Where `read` finds blocks int64 [N]: an index int64 [2 * Hkv * N] of runs [block_size * D], head by head."""
        return (self._planes * (self.num_slots // self.block_size) + blocks).flatten()

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, Hkv, D] at `rows_to_write`."""
        vectors = torch.cat((k, v), 1).view(-1, self.head_dim)
        self.layers[layer].view(-1, self.head_dim).index_copy_(0, rows, vectors)

    def read(self, layer: int, runs: Tensor) -> Tensor:
        """K and V at `runs_to_read` of N blocks, [2, Hkv, N * block_size, D]. Valid until the next read: all reads
        share their memory, for a buffer that's warm in the CPU's cache costs half as much to fill as a new one."""
        source = self.layers[layer].view(-1, self.block_size * self.head_dim)
        size = len(runs) * source.shape[1]
        if size > len(self._scratch):
            self._scratch = source.new_empty(size)
        out = self._scratch[:size].view(len(runs), -1)
        torch.index_select(source, 0, runs, out=out)
        return out.view(2, self.num_kv_heads, -1, self.head_dim)

    def copy_blocks(self, pairs: Many[tuple[int, int]]) -> None:
        """Copy some blocks (source, destination) in all layers; every source is read before any destination is written."""
        source, destination = torch.tensor(pairs, device=self._planes.device).unbind(1)
        for blocks in self._blocks():
            blocks.index_copy_(1, destination, blocks.index_select(1, source))

    def _blocks(self) -> list[Tensor]:
        """Each layer as [2 * Hkv, num_blocks, block_size * D]."""
        return [layer.view(len(layer), -1, self.block_size * self.head_dim) for layer in self.layers]

    def store_blocks(self, pairs: Many[tuple[int, int]]) -> None:
        """Copy some blocks (block, host slot) to host memory, all of a layer at once."""
        source, destination = torch.tensor(pairs).unbind(1)
        for i, blocks in enumerate(self._blocks()):
            gathered = blocks.index_select(1, source.to(blocks.device)).transpose(0, 1)
            self.host[:, i].index_copy_(0, destination, gathered.cpu())

    def load_blocks(self, pairs: Many[tuple[int, int]]) -> None:
        """Copy some blocks (host slot, block) back from host memory, all of a layer at once."""
        source, destination = torch.tensor(pairs).unbind(1)
        for i, blocks in enumerate(self._blocks()):
            gathered = self.host[:, i].index_select(0, source).transpose(0, 1)
            blocks.index_copy_(1, destination.to(blocks.device), gathered.to(blocks.device))

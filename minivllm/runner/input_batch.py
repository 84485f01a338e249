"""From a step plan to flat tensors: what the decoder and the attention backends read."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.plan import Row, StepPlan


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The rows of a step, laid end to end: T tokens of B rows, row r at tokens query_starts[r] .. query_starts[r + 1].

    Tensors are int64. Lengths are kept as Python numbers too: attention decides by them, and mustn't wait for a device.

    Layers with a window see the rows through another one: `block_tables` begin with the first block that the window of a
    row's first token reaches, and `starts` and `context_lengths` count from there; `positions` stay those of the text.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]: where each token's K and V go; -1, in padding only: nowhere
    block_tables: Tensor  # [B, most blocks of a row], padded with the null block 0
    query_starts: tuple[int, ...]  # [B + 1]
    starts: tuple[int, ...]  # [B]: position of each row's first token
    context_lengths: tuple[int, ...]  # [B]: what each row's last token attends to, itself included
    lengths: Tensor  # [B]: the same, for kernels
    logits_indices: Tensor  # [R]: last token of each row that is sampled; where it has drafts, those and the one before
    prompt_rows: tuple[int, ...]  # rows whose every position needs logits
    block_size: int
    window: int | None = None  # how many tokens, itself included, a token attends to

    def blocks(self, rows: Many[int], count: int) -> Tensor:
        """The first `count` blocks of some rows: int64 [len(rows), count]. Past a row's context its first block
        repeats: always one that the row owns."""
        table = F.pad(self.block_tables[list(rows)], (0, max(0, count - self.block_tables.shape[1])))
        starts, lengths = self._block_starts(count), self._lengths(rows)
        return torch.where(starts < lengths, table[:, :count], table[:, :1])

    def unwritten(self, rows: Many[int], count: int) -> Tensor:
        """Which slots of `blocks(rows, count)` hold nothing of the row: bool [len(rows), count * block_size]."""
        starts, lengths = self._block_starts(count), self._lengths(rows)
        starts = torch.where(starts < lengths, starts, 0)
        positions = starts[:, :, None] + torch.arange(self.block_size, device=starts.device)
        return (positions >= lengths[:, :, None]).flatten(1)

    def to(self, device: torch.device) -> InputBatch:
        """The same with its tensors on a device."""
        tensors = {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})  # type: ignore[arg-type]

    def without_logits(self) -> InputBatch:
        """The same rows run for their K and V alone."""
        return replace(self, logits_indices=self.logits_indices[:0], prompt_rows=())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as arrays, which takes a twentieth of the time that tensors take. The tensors must be on the CPU."""
        values = (getattr(self, f.name) for f in fields(self))
        return _from_arrays, tuple(v.numpy() if isinstance(v, Tensor) else v for v in values)

    def _block_starts(self, count: int) -> Tensor:
        return torch.arange(count, device=self.block_tables.device) * self.block_size

    def _lengths(self, rows: Many[int]) -> Tensor:
        return self.lengths[list(rows)][:, None]


def _from_arrays(*values: Any) -> InputBatch:
    tensors: list[Any] = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values]
    return InputBatch(*tensors)


def build_input_batch(
    plan: StepPlan, block_size: int, device: torch.device | str = "cpu", group: int = 0, window: int | None = None
) -> InputBatch:
    """Lay the rows of a plan end to end, for layers of one group with one window. Costs a few microseconds a row; no loop
    over tokens."""
    rows = plan.rows
    lengths = np.array([row.num_tokens for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    query_starts = np.concatenate(([0], np.cumsum(lengths)))
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(query_starts[-1]) - (query_starts[:-1] - starts)[row_of_token]
    tables = pad_block_tables([row.more_block_ids[group - 1] if group else row.block_ids for row in rows])
    slots = tables[row_of_token, positions // block_size] * block_size + positions % block_size
    token_ids = np.array([token for row in rows for token in row.token_ids], dtype=np.int64)
    if window is not None:
        skipped = np.maximum(starts - window + 1, 0) // block_size
        columns = np.arange(tables.shape[1]) + skipped[:, None]
        tables = np.take_along_axis(tables, columns.clip(max=tables.shape[1] - 1), 1)
        starts = starts - skipped * block_size
    ends = [(stop, len(row.drafts)) for row, stop in zip(rows, query_starts[1:], strict=True) if row.samples]
    sampled = [index for stop, drafts in ends for index in range(stop - drafts - 1, stop)]

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return InputBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slot_mapping=tensor(slots),
        block_tables=tensor(tables),
        query_starts=tuple(query_starts.tolist()),
        starts=tuple(starts.tolist()),
        context_lengths=tuple((starts + lengths).tolist()),
        lengths=tensor(starts + lengths),
        logits_indices=tensor(np.array(sampled, dtype=np.int64)),
        prompt_rows=tuple(index for index, row in enumerate(rows) if wants_prompt_logits(row)),
        block_size=block_size,
        window=window,
    )


def pad_block_tables(tables: list[list[int]]) -> np.ndarray:
    """Block tables side by side: int64 [B, most blocks of a row], padded with the null block 0."""
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
    for index, table in enumerate(tables):
        padded[index, : len(table)] = table
    return padded


def wants_prompt_logits(row: Row) -> bool:
    """Whether the row holds prompt positions of a request that asked for their log-probabilities."""
    sequence = row.sequence
    return sequence.request.params.prompt_logprobs is not None and row.start < sequence.num_prompt

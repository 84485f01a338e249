"""Paged attention: the fast backend gives the reference's numbers, and only a row's own slots are ever read.

Behind a window, only slots that it reaches: all others, those of the null block first of all, are NaN.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.config import ModelConfig
from minivllm.plan import Row, StepPlan
from minivllm.request import Request, SamplingParams
from minivllm.runner import attention
from minivllm.runner.attention import BACKENDS, bucket_by_length
from minivllm.runner.input_batch import build_input_batch
from minivllm.runner.kv_cache import KVCache
from minivllm_kernels import cpu


@dataclass
class Step:
    """A step over a cache whose slots outside the rows' past are NaN, with the q, k, v of its tokens."""

    model: ModelConfig
    block_size: int
    num_blocks: int
    plan: StepPlan
    seed: int
    window: int | None = None

    def run(self, backend: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        cache = KVCache(self.model, self.num_blocks, self.block_size, torch.float32)
        cache.layers[0].fill_(math.nan)
        for row in self.plan.rows:
            for position in range(self.first_seen(row), row.start):
                slot = row.block_ids[position // self.block_size] * self.block_size + position % self.block_size
                cache.layers[0][:, slot] = draw(*cache.layers[0][:, slot].shape)
        tokens, dim = self.plan.num_tokens, self.model.head_dim
        q, kv = draw(tokens, self.model.num_heads, dim), draw(tokens, 2 * self.model.num_kv_heads, dim)
        batch = build_input_batch(self.plan, self.block_size, window=self.window)
        self.batch, self.cache, self.q = batch, cache, q
        return BACKENDS[backend](cache).prepare(batch)(0, q, *kv.chunk(2, 1))

    def first_seen(self, row: Row) -> int:
        """The first position of the first block that the row's window reaches; all before it is gone."""
        if self.window is None:
            return 0
        return max(row.start - self.window + 1, 0) // self.block_size * self.block_size

    def dense(self) -> torch.Tensor:
        """Masked attention over the whole text of each row of the latest run, where what is gone counts for nothing."""
        outputs = []
        for row, begin, end in zip(self.plan.rows, self.batch.query_starts, self.batch.query_starts[1:], strict=False):
            slots = [
                row.block_ids[p // self.block_size] * self.block_size + p % self.block_size for p in range(row.stop)
            ]
            k, v = self.cache.layers[0][:, slots].nan_to_num().chunk(2)
            repeat = self.model.num_heads // self.model.num_kv_heads
            distance = torch.arange(row.start, row.stop)[:, None] - torch.arange(row.stop)
            seen = (distance >= 0) & (distance < (self.window or row.stop))
            scores = (
                self.q[begin:end].transpose(0, 1)
                @ k.repeat_interleave(repeat, 0).transpose(1, 2)
                * self.model.head_dim**-0.5
            )
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            outputs.append((weights @ v.repeat_interleave(repeat, 0)).transpose(0, 1))
        return torch.cat(outputs)


@st.composite
def steps(draw: st.DrawFn, head_dim: int = 4) -> Step:
    """Rows of one or several tokens behind a past, over permuted blocks; a row may begin with another's blocks."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    model = ModelConfig("llama", 8, 8, 8, 1, kv_heads * group, kv_heads, head_dim)
    size = draw(st.sampled_from([1, 4, 16]))
    shapes = draw(
        st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=5)
    )
    needed = sum(-(-(start + length) // size) for start, length in shapes)
    free = draw(st.permutations(range(1, needed + 1)))
    rows: list[Row] = []
    for index, (start, length) in enumerate(shapes):
        count = -(-(start + length) // size)
        table, free = free[:count], free[count:]
        if rows and draw(st.booleans()):  # full blocks of the row before, some of which it fills in this step
            shared = min(rows[-1].stop, start) // size
            table = rows[-1].block_ids[:shared] + table[shared:]
        request = Request(str(index), [1] * (start + length), SamplingParams(), max_tokens=1)
        rows.append(Row(request.sequences[0], start, length, table))
    return Step(model, size, needed + 2, StepPlan(0, rows), draw(st.integers(0, 2**16)))


@given(steps())
def test_torch_backend_equals_reference_and_never_reads_a_foreign_slot(step):
    expected = step.run("reference")
    assert expected.isfinite().all()
    torch.testing.assert_close(step.run("torch"), expected, rtol=1e-5, atol=1e-5)


@given(steps(), st.one_of(st.none(), st.integers(1, 30)))
def test_attention_from_what_is_left_equals_dense_windowed_attention(step, window):
    step.window = window
    for row in step.plan.rows:
        gone = step.first_seen(row) // step.block_size
        row.block_ids = [0] * gone + row.block_ids[gone:]
    for backend in ("reference", "torch"):
        torch.testing.assert_close(step.run(backend), step.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(bool(cpu.why_not()), reason="no C++ compiler")
@given(steps(head_dim=32), st.one_of(st.none(), st.integers(1, 30)))
def test_cpp_backend_equals_reference_and_never_reads_a_foreign_slot(step, window):
    step.window = window
    torch.testing.assert_close(step.run("cpp"), step.run("reference"), rtol=1e-5, atol=1e-5)


@given(steps(), st.integers(1, 7), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 30)))
def test_result_does_not_depend_on_query_chunks_and_padding(step, chunk, length_step, window):
    step.window = window
    expected = step.run("torch")
    before = attention.QUERY_CHUNK, attention.LENGTH_STEP
    attention.QUERY_CHUNK, attention.LENGTH_STEP = chunk, length_step
    try:
        torch.testing.assert_close(step.run("torch"), expected, rtol=1e-5, atol=1e-5)
    finally:
        attention.QUERY_CHUNK, attention.LENGTH_STEP = before


@given(st.lists(st.integers(1, 500)), st.integers(0, 300))
def test_buckets_hold_each_row_once_and_little_padding(lengths, allowed):
    buckets = bucket_by_length(lengths, allowed)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        longest = max(lengths[i] for i in bucket)
        assert sum(longest - lengths[i] for i in bucket) <= allowed

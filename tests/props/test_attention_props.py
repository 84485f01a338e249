"""Paged attention: the fast backend gives the reference's numbers, and only a row's own slots are ever read."""

import math
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.config import ModelConfig
from minivllm.plan import Row, StepPlan
from minivllm.request import Request, SamplingParams
from minivllm.runner import attention
from minivllm.runner.attention import bucket_by_length, make_attention
from minivllm.runner.input_batch import build_input_batch
from minivllm.runner.kv_cache import KVCache


@dataclass
class Step:
    """A step over a cache whose slots outside the rows' past are NaN, with the q, k, v of its tokens."""

    model: ModelConfig
    block_size: int
    num_blocks: int
    plan: StepPlan
    seed: int

    def run(self, backend: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        cache = KVCache(self.model, self.num_blocks, self.block_size, torch.float32)
        cache.layers[0].fill_(math.nan)
        for row in self.plan.rows:
            for position in range(row.start):
                slot = row.block_ids[position // self.block_size] * self.block_size + position % self.block_size
                cache.layers[0][:, slot] = draw(*cache.layers[0][:, slot].shape)
        tokens, dim = self.plan.num_tokens, self.model.head_dim
        q, kv = draw(tokens, self.model.num_heads, dim), draw(tokens, 2 * self.model.num_kv_heads, dim)
        batch = build_input_batch(self.plan, self.block_size)
        return make_attention(backend, cache).prepare(batch)(0, q, *kv.chunk(2, 1))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Rows of one or several tokens behind a past, over permuted blocks; a row may begin with another's blocks."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    model = ModelConfig("llama", 8, 8, 8, 1, kv_heads * group, kv_heads, 4)
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


@given(steps(), st.integers(1, 7), st.integers(1, 5))
def test_result_does_not_depend_on_query_chunks_and_padding(step, chunk, length_step):
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

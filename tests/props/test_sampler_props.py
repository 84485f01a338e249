"""What holds for every row of logits, and every batch."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.request import Request, SamplingParams
from minivllm.sample.sampler import Sampler, draw_token, nucleus, softmax_weights, truncate

VOCAB = 37

# few distinct values make ties, as bfloat16 logits do
logit = st.one_of(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), st.floats(-30, 30, width=32))
rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB).map(lambda values: np.array(values, dtype=np.float32))
numbers = st.floats(0, 1, exclude_max=True)
token_ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=2),
    seed=st.one_of(st.none(), st.integers(0, 2**63 - 1)),
    min_tokens=st.integers(0, 3),
    logprobs=st.sampled_from([None, 0, 3]),
)
drawers = st.lists(st.tuples(rows, params, token_ids, token_ids), min_size=1, max_size=5)


def sequences_of(drawers):
    requests = [Request(f"r{i}", prompt, p, max_tokens=99) for i, (_, p, prompt, _) in enumerate(drawers)]
    for made, (_, _, _, output) in zip(requests, drawers, strict=True):
        made.sequences[0].output_token_ids = output
    return [made.sequences[0] for made in requests]


def sample(rows, sequences):
    drawn = Sampler({0}, VOCAB).sample(torch.from_numpy(np.stack(rows)), [(s,) for s in sequences])
    return [token.token_id for [token] in drawn]


@given(drawers, st.randoms(use_true_random=False))
def test_a_sequence_draws_the_same_token_alone_and_anywhere_in_any_batch(drawers, random):
    rows, sequences = [row for row, *_ in drawers], sequences_of(drawers)
    alone = [sample([row], [sequence])[0] for row, sequence in zip(rows, sequences, strict=True)]
    order = list(range(len(rows)))
    random.shuffle(order)
    together = sample([rows[i] for i in order], [sequences[i] for i in order])
    assert together == [alone[i] for i in order]


@given(rows, st.floats(0.05, 5), st.floats(0.01, 0.999))
def test_the_nucleus_is_the_shortest_beginning_of_the_ranking_that_reaches_top_p(row, temperature, top_p):
    weights = softmax_weights(row, temperature)
    kept = nucleus(row, weights, top_p)
    ranking = np.lexsort((np.arange(VOCAB), -row))
    assert sorted(ranking[: len(kept)]) == kept.tolist()
    share = weights[kept].sum() / weights.sum()
    assert share >= top_p - 1e-12
    assert share - weights[ranking[len(kept) - 1]] / weights.sum() < top_p + 1e-12


@given(rows, params.filter(lambda p: not p.greedy))
def test_truncation_keeps_a_beginning_of_the_ranking_with_the_weights_it_had(row, params):
    weights = softmax_weights(row, params.temperature)
    kept = truncate(row, weights, params.min_p, params.top_k, params.top_p)
    assert kept[row.argmax()] == 1
    assert ((kept == weights) | (kept == 0)).all()
    dropped = (kept == 0) & (weights > 0)
    assert not dropped.any() or row[dropped].max() <= row[kept > 0].min()


@given(rows, params.filter(lambda p: not p.greedy), numbers)
def test_a_drawn_token_survived_truncation(row, params, number):
    weights = softmax_weights(row, params.temperature)
    kept = truncate(row, weights, params.min_p, params.top_k, params.top_p)
    assert kept[draw_token(row, params, number)] > 0


@given(rows, st.floats(0.05, 5), numbers)
def test_top_k_1_is_greedy(row, temperature, number):
    assert draw_token(row, SamplingParams(temperature=temperature, top_k=1), number) == row.argmax()


@given(rows, numbers)
def test_truncation_that_drops_nothing_changes_no_draw(row, number):
    loose = SamplingParams(top_k=VOCAB, min_p=1e-300)
    assert draw_token(row, loose, number) == draw_token(row, SamplingParams(), number)

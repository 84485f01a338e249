"""Log-probabilities, ranks and top lists of tokens."""

import math

import numpy as np
import pytest
import torch

from minivllm.sample.logprobs import ROWS_AT_ONCE, prompt_logprobs, rank_tokens, token_logprobs


def test_ranking_puts_the_largest_first_and_equal_ones_by_id():
    assert rank_tokens(np.array([1.0, 3.0, 2.0, 3.0, 2.0]), 4).tolist() == [1, 3, 2, 4]


def test_ranking_cuts_between_equals():
    assert rank_tokens(np.array([1.0, 1.0, 1.0]), 2).tolist() == [0, 1]


def test_ranking_more_tokens_than_there_are_gives_all():
    assert rank_tokens(np.array([1.0, 2.0]), 5).tolist() == [1, 0]


def test_logprobs_are_natural_logarithms_of_the_softmax():
    [entry] = token_logprobs(torch.tensor([[0.1, 0.6, 0.3]]).log(), [2], [0])
    assert entry.logprob == pytest.approx(math.log(0.3))
    assert (entry.token_id, entry.rank, entry.top) == (2, 2, ())


def test_adding_a_constant_to_all_logits_changes_nothing():
    [low], [high] = (token_logprobs(torch.tensor([[1.0, 2.0]]) + c, [0], [1]) for c in (0, 100))
    assert low.logprob == pytest.approx(high.logprob, abs=1e-5)


def test_the_rank_of_a_token_is_its_place_in_the_top_list_even_among_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    for token in range(5):
        [entry] = token_logprobs(logits, [token], [5])
        assert entry.top[entry.rank - 1] == (token, entry.logprob)


def test_masked_tokens_have_no_probability_and_are_not_told():
    [entry] = token_logprobs(torch.tensor([[0.0, -math.inf]]), [1], [2])
    assert entry.logprob == -math.inf
    assert entry.top == ((0, 0.0),)


def test_a_long_prompt_gives_what_its_rows_give_one_by_one():
    num_rows = 2 * ROWS_AT_ONCE + 3
    logits = torch.randn(num_rows, 7, generator=torch.Generator().manual_seed(0))
    token_ids = [i % 7 for i in range(num_rows)]
    entries = prompt_logprobs(logits, token_ids, 2)
    assert [e.token_id for e in entries] == token_ids
    for i in (0, ROWS_AT_ONCE, num_rows - 1):
        [alone] = token_logprobs(logits[i : i + 1], token_ids[i : i + 1], [2])
        assert entries[i].logprob == pytest.approx(alone.logprob)
        assert (entries[i].rank, [t for t, _ in entries[i].top]) == (alone.rank, [t for t, _ in alone.top])


def test_no_tokens_give_no_logprobs():
    assert prompt_logprobs(torch.zeros(0, 7), [], 3) == []

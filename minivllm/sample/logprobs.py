"""How likely the model held tokens to be."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minivllm.request import TokenLogprob

ROWS_AT_ONCE = 64  # a long prompt's comparisons of [P, V] booleans would take more memory than its logits


def rank_tokens(logits: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Ids of the k largest of `logits` [V], largest first, equal ones by id; all of them when k >= V.

    Only the k best and those equal to the last of them are sorted: finding that last one needs no sort.
    """
    if k >= len(logits):
        return np.argsort(-logits, kind="stable")
    worst = np.partition(logits, len(logits) - k)[len(logits) - k]
    ids = np.flatnonzero(logits >= worst)
    return ids[np.argsort(-logits[ids], kind="stable")][:k]


def token_logprobs(logits: Tensor, token_ids: Many[int], num_top: Many[int]) -> list[TokenLogprob]:
    """The log-probability of `token_ids[i]` under row i of `logits` [R, V], its rank, and the row's `num_top[i]` most likely
    tokens.

    Logits are taken as they are: pass the model's own, before temperature or penalties. The logarithm is natural.
    Rank 1 is the most likely token; among equal ones the lower id ranks first, in `rank` and in `top`. Tokens that can't be
    drawn (-inf: a grammar forbids them) aren't in `top`.
    """
    if not token_ids:
        return []
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen = logits.gather(1, ids)
    total = logits.logsumexp(1, keepdim=True)
    earlier = torch.arange(logits.shape[1], device=logits.device) < ids
    ranks = 1 + ((logits > chosen) | ((logits == chosen) & earlier)).sum(1)
    tops = [_top(row, norm, k) if k else () for row, norm, k in zip(logits, total, num_top, strict=True)]
    values = (chosen - total).squeeze(1)
    return [
        TokenLogprob(token, value, rank, top)
        for token, value, rank, top in zip(token_ids, values.tolist(), ranks.tolist(), tops, strict=True)
    ]


def top_logprobs(logits: Tensor, k: int) -> list[tuple[tuple[int, float], ...]]:
    """The k most likely tokens of each row of `logits` [R, V], as (id, log-probability), likeliest first, equal ones by id."""
    total = logits.logsumexp(1, keepdim=True)
    return [_top(row, norm, k) for row, norm in zip(logits, total, strict=True)]


def _top(row: Tensor, total: Tensor, k: int) -> tuple[tuple[int, float], ...]:
    ids = rank_tokens(row.cpu().numpy(), k)
    pairs = zip(ids.tolist(), (row[torch.from_numpy(ids)] - total).tolist(), strict=True)
    return tuple(pair for pair in pairs if pair[1] > -math.inf)


def prompt_logprobs(logits: Tensor, token_ids: Many[int], k: int) -> list[TokenLogprob]:
    """`token_logprobs` for P consecutive prompt positions: row i of `logits` [P, V] foretells `token_ids[i]`.

    The logits at position p foretell the token at p + 1. So the caller passes the tokens one place further on than the
    rows, and the first prompt token, foretold by nothing, has no entry.
    """
    num_top = [k] * len(token_ids)
    parts = (slice(i, i + ROWS_AT_ONCE) for i in range(0, len(token_ids), ROWS_AT_ONCE))
    return [entry for part in parts for entry in token_logprobs(logits[part], token_ids[part], num_top[part])]

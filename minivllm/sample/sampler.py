"""From logits to tokens: masks, bias, penalties, temperature, truncation, one draw."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minivllm.config import MinivllmError, RequestError
from minivllm.request import SampledToken, SamplingParams, Sequence
from minivllm.sample.logprobs import rank_tokens, token_logprobs
from minivllm.sample.random import sequence_key, uniforms

SMALLEST = float(np.finfo(np.float64).tiny)
NUM_BINS = 1024


class LogitsError(MinivllmError):
    """Logits from which no token can be drawn. `requests` are the ids of those affected; the others are sound."""

    def __init__(self, requests: tuple[str, ...]) -> None:
        names = ", ".join(map(repr, requests))
        super().__init__(
            f"logits of request {names}: the largest is not a finite number, so no token can be drawn. NaN or inf: look "
            "for an overflow in the model (try dtype=float32). -inf: a mask left no token to choose"
        )
        self.requests = requests


class Sampler:
    """Draws the next token of every sequence of a step.

    For each sequence, in this order (that of vLLM V1, `v1/sample/sampler.py`):

    1. end-of-sequence and stop ids are masked until it has `min_tokens` tokens, unless a grammar's mask left only them;
    2. `logit_bias` is added;
    3. penalties: repetition over prompt and output, then frequency and presence over the output;
    4. greedy sequences take the largest logit now, the lowest id among equals: nothing below changes which it is;
    5. temperature, then `min_p`, `top_k` and `top_p`, each over what the one before left;
    6. one draw, with a random number that depends on the sequence's seed and output position alone.

    Hence a sequence's token depends on its own logits, parameters and tokens: not on the batch, its order, or time.
    Only temperature 0 is greedy. However small, any other is exact: the largest logit is subtracted before the division.
    Log-probabilities are those of the logits as they came in, before all six (vLLM's default, `raw_logprobs`).
    """

    def __init__(self, eos_token_ids: Collection[int], vocab_size: int, engine_seed: int = 0) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size = vocab_size
        self.engine_seed = engine_seed

    def check(self, params: SamplingParams) -> None:
        """Raise `RequestError` if `params` name a token that the vocabulary lacks. Call it before a request runs."""
        for field, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise RequestError(field, token, f"must be a token id, 0 to {self.vocab_size - 1}")

    def sample(self, logits: Tensor, groups: Many[tuple[Sequence, ...]]) -> list[list[SampledToken]]:
        """One token for each sequence of `groups`, in the same nesting.

        `logits` is float32 [R, V], R == len(groups); all sequences of `groups[r]` draw from row r, each on its own (the
        children of one prompt, at its end). It is not changed. Raises `LogitsError` for rows without a largest number.
        """
        sequences = [sequence for group in groups for sequence in group]
        if not sequences:
            return [[] for _ in groups]
        raw = _row_per_sequence(logits, groups)
        processed = self._process(raw, sequences)
        tokens = self._draw(processed, sequences)
        drawn = iter(with_logprobs(tokens, raw, sequences))
        return [[next(drawn) for _ in group] for group in groups]

    def distributions(self, logits: Tensor, sequences: list[Sequence]) -> list[NDArray[np.float64]]:
        """What `sample` draws from, for sequences that aren't greedy: probabilities [V] from each row of `logits` [S, V]."""
        rows = zip(self._process(logits, sequences), sequences, strict=True)
        return [distribution(row.cpu().numpy(), sequence.request.params) for row, sequence in rows]

    def _process(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        """Steps 1 to 3. Copies only if a sequence asks for one of them."""
        rows = [i for i, sequence in enumerate(sequences) if _is_processed(sequence)]
        if not rows:
            return logits
        logits = logits.clone()
        for i in rows:
            params, output = sequences[i].request.params, sequences[i].output_token_ids
            if len(output) < params.min_tokens:
                ends = self.eos_token_ids.union(params.stop_token_ids)
                if params.guided is None or _leaves_some(logits[i], ends):
                    mask_tokens(logits[i], ends)
            add_bias(logits[i], params.logit_bias)
            penalise(logits[i], sequences[i].request.prompt_token_ids, output, params)
        return logits

    def _draw(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """Steps 4 to 6."""
        largest, ids = logits.max(dim=1)
        require_finite(largest, sequences)
        tokens = ids.tolist()
        rows = [i for i, sequence in enumerate(sequences) if not sequence.request.params.greedy]
        keys = [self.key(sequences[i]) for i in rows]
        numbers = uniforms(keys, [len(sequences[i].output_token_ids) for i in rows])
        for i, number in zip(rows, numbers.tolist(), strict=True):
            tokens[i] = draw_token(logits[i].cpu().numpy(), sequences[i].request.params, number)
        return tokens

    def key(self, sequence: Sequence) -> int:
        """With which all of a sequence's random numbers are made."""
        request = sequence.request
        return sequence_key(request.params.seed, sequence.index, self.engine_seed, request.id)


def _row_per_sequence(logits: Tensor, groups: Many[tuple[Sequence, ...]]) -> Tensor:
    """Repeat or drop rows so that each sequence has its own: [R, V] to [S, V]."""
    if all(len(group) == 1 for group in groups):
        return logits
    counts = torch.tensor([len(group) for group in groups], device=logits.device)
    return logits.repeat_interleave(counts, dim=0)


def _is_processed(sequence: Sequence) -> bool:
    params = sequence.request.params
    penalties = params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    return bool(penalties or params.logit_bias or len(sequence.output_token_ids) < params.min_tokens)


def _leaves_some(logits: Tensor, token_ids: Collection[int]) -> bool:
    """Whether any token but these is possible."""
    others = logits.clone()
    mask_tokens(others, token_ids)
    return bool(others.max() > -math.inf)


def require_finite(largest: Tensor, sequences: list[Sequence]) -> None:
    """Raise `LogitsError` unless `largest` [S], each sequence's largest logit, is finite: it is NaN if any is, -inf if all are."""
    if not bool(largest.isfinite().all()):
        bad = (s.request.id for s, ok in zip(sequences, largest.isfinite().tolist(), strict=True) if not ok)
        raise LogitsError(tuple(dict.fromkeys(bad)))


def with_logprobs(tokens: list[int], raw: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    """Add to the tokens of the sequences that ask for it what the raw logits [S, V] say of them."""
    wanted = {i: k for i, s in enumerate(sequences) if (k := s.request.params.logprobs) is not None}
    rows = list(wanted)
    found = token_logprobs(raw[rows], [tokens[i] for i in rows], list(wanted.values()))
    entries = dict(zip(rows, found, strict=True))
    return [SampledToken(token, entries.get(i)) for i, token in enumerate(tokens)]


def mask_tokens(logits: Tensor, token_ids: Collection[int]) -> None:
    """Make `token_ids` impossible: their entries of `logits` [V] become -inf, in place."""
    logits[list(token_ids)] = -math.inf


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> None:
    """Add `bias[token]` to the logit of each token named, in place; `logits` is [V]. OpenAI's `logit_bias`."""
    if bias:
        logits[list(bias)] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)


def penalise(logits: Tensor, prompt: Many[int], output: Many[int], params: SamplingParams) -> None:
    """Make tokens that occurred less likely (or more, for the opposite values), in place; `logits` is [V].

    First repetition (Keskar et al., "CTRL", 2019, section 4.1): the logit of each token of prompt or output is divided
    by the penalty if positive, else multiplied by it: both lower it for a penalty over 1. Then, for tokens of the
    output only (OpenAI's definition): minus `frequency_penalty` times the number of occurrences, minus
    `presence_penalty` once.
    """
    if params.repetition_penalty != 1:
        seen = torch.tensor(list({*prompt, *output}), dtype=torch.long, device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if output and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.tensor(output, device=logits.device).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty


def draw_token(logits: NDArray[np.floating], params: SamplingParams, number: float) -> int:
    """Steps 5 and 6 for one sequence: the token that `number`, uniform in [0, 1), draws from `logits` [V].

    A pure function. As `number` goes over [0, 1), each token kept comes up on an interval as long as its probability.
    """
    weights = softmax_weights(logits, params.temperature)
    return choose(truncate(logits, weights, params.min_p, params.top_k, params.top_p), number)


def distribution(logits: NDArray[np.floating], params: SamplingParams) -> NDArray[np.float64]:
    """The probabilities [V] with which `draw_token` draws from `logits` [V]."""
    weights = softmax_weights(logits, params.temperature)
    kept = truncate(logits, weights, params.min_p, params.top_k, params.top_p)
    return kept / kept.sum()


def softmax_weights(logits: NDArray[np.floating], temperature: float) -> NDArray[np.float64]:
    """Probabilities at `temperature` > 0 up to a common factor, which makes the largest weight 1; [V] to float64 [V].

    Subtracting the largest logit first leaves nothing to overflow. Not dividing by the sum saves a pass: what follows
    only compares weights with each other.
    """
    weights = logits.astype(np.float64)
    weights -= weights.max()
    with np.errstate(over="ignore"):  # at a tiny temperature far logits become -inf, weight 0: the right limit
        weights /= max(temperature, SMALLEST)
    return np.exp(weights, out=weights)


def truncate(
    logits: NDArray[np.floating], weights: NDArray[np.float64], min_p: float, top_k: int, top_p: float
) -> NDArray[np.float64]:
    """`weights` [V] with 0 in place of each token that must not be drawn; the largest weight given is 1.

    Each step sees what the one before left: `min_p` keeps tokens at least `min_p` times as likely as the most likely
    (Nguyen et al., "Turning up the heat: min-p sampling", 2024), `top_k` (0: off) the k most likely, `top_p` the
    nucleus. Tokens rank by their logit, equal ones by id. The first in rank survives everything.
    """
    if min_p:
        weights = np.where(weights >= min_p, weights, 0)
    if 0 < top_k < len(weights):
        weights = _only(weights, rank_tokens(logits, top_k))
    if top_p < 1:
        weights = _only(weights, nucleus(logits, weights, top_p))
    return weights


def _only(weights: NDArray[np.float64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    kept = np.zeros_like(weights)
    kept[ids] = weights[ids]
    return kept


def nucleus(logits: NDArray[np.floating], weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Ids, ascending, of the smallest set of most likely tokens whose share of all weight reaches `top_p` < 1.

    `logits` and `weights` are [V]; equal logits rank by id, and a weight of 0 means out already. The token with which
    the share reaches `top_p` is in, and reaching it exactly is enough. At least one token is kept. Source: Holtzman et
    al., "The curious case of neural text degeneration", 2020.

    Tokens that each have less than (1 - top_p) / V of all weight have less than 1 - top_p of it together, so the others
    reach `top_p` alone: only those are looked at (half of that floor is used, to leave room for rounding).
    """
    total = weights.sum()
    ids = np.flatnonzero(weights >= (1 - top_p) / (2 * len(weights)) * total)
    return ids[_smallest_set(logits[ids], weights[ids], top_p * total)]


def _smallest_set(logits: NDArray[np.floating], weights: NDArray[np.float64], wanted: float) -> NDArray[np.int64]:
    """Indices, ascending, of the first in rank that together weigh `wanted`, without sorting them all.

    Logits are dropped into bins of equal width, the largest into bin 0, which takes one pass. The weight in each bin
    tells in which one the running sum reaches `wanted`: those before are in, those after are out, that one is sorted.
    """
    top, bottom = logits.max(), logits.min()
    span = max(top - bottom, np.finfo(logits.dtype).tiny)  # 0 if all are equal
    bins = ((top - logits) / span * NUM_BINS).astype(np.int64)
    bin_weights = np.bincount(bins, weights)
    border = int(np.searchsorted(np.cumsum(bin_weights), wanted))
    unsure = np.flatnonzero(bins == border)
    ranked = unsure[np.argsort(-logits[unsure], kind="stable")]
    size = 1 + int(np.searchsorted(np.cumsum(weights[ranked]), wanted - bin_weights[:border].sum()))
    is_in = bins < border
    is_in[ranked[:size]] = True
    return np.flatnonzero(is_in)


def choose(weights: NDArray[np.float64], number: float) -> int:
    """The index that `number`, uniform in [0, 1), picks with probability in proportion to `weights` float64 [M].

    Inversion: lay the weights end to end and see on which the point at `number` times their length falls. Index i gets
    [weights[:i].sum(), weights[: i + 1].sum()), so a weight of 0 is never picked. One number a draw is enough, where
    Gumbel-max would need one for each token: that is the better trade on a GPU, where random bits are cheap and a
    running sum is not.
    """
    ends = torch.from_numpy(weights).cumsum(0).numpy()  # several times as fast as NumPy's
    return int(np.searchsorted(ends, number * ends[-1], side="right"))

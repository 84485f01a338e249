"""Speculative decoding: guess several tokens, let the model check all of them in one forward, keep those that hold.

A decode step reads every weight to compute one token; to compute 1 + k costs hardly more while the batch is small. So
somebody cheap proposes k *drafts*, the row runs them behind the last known token, and its k + 1 logits say what the model
itself would have said after each. The scheduler rolls back what was wrong: the next row overwrites its KV, and as only
known tokens have hashes, none of it was ever published.

Greedy answers don't change: a draft holds if it is the token that the model takes. Nor do sampled ones where drafts are
certain (looked up in the text): each position draws with its own random number, as ever, and a draft holds if it is what
was drawn. That accepts draft d with probability p(d) and draws from the rest otherwise: the rule below, for a q that is
all on d. A draft model's guesses are drawn from a q of their own, and holding on to them more often, with probability
min(1, p / q), keeps the distribution but not the draw: `accept_drafts`.

Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; Chen et al., "Accelerating
large language model decoding with speculative sampling", 2023; vLLM 0.32, `v1/sample/rejection_sampler.py` and
`v1/spec_decode/ngram_proposer.py`. Different here: a draft model runs in the target's own blocks (`engine/draft_model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minivllm.config import EngineConfig
from minivllm.plan import StepPlan
from minivllm.request import SampledToken, Sequence
from minivllm.sample.sampler import choose

PROPOSE, ACCEPT = 1, 2
"""Streams of random numbers beside that of the draws (`sample/random.py`)."""


class NgramSpeculation:
    """Proposes what followed the last tokens where they occurred before. Needs no model; certain of what it says."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def propose(self, sequence: Sequence) -> list[int]:
        """Drafts for a sequence's next step, perhaps none."""
        config, tokens = self.config, sequence.tokens(0, sequence.num_tokens)
        return find_continuation(tokens, config.spec_ngram_min, config.spec_ngram_max, config.spec_tokens)

    def verify(self, logits: Tensor, plan: StepPlan, drawn: list[list[SampledToken]]) -> list[list[SampledToken]]:
        """See `keep_matching`."""
        return keep_matching(plan, drawn)


def find_continuation(tokens: list[int], shortest: int, longest: int, k: int) -> list[int]:
    """Up to `k` tokens that followed an earlier occurrence of the last ones: [] if there is none.

    The longest run of last tokens that occurs before counts, of `shortest` to `longest` tokens, and its first occurrence:
    the most tokens follow that one. Source: Saxena, "Prompt lookup decoding", 2023.
    """
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        last = tokens[-n:]
        for start in range(len(tokens) - n):
            if tokens[start] == last[0] and tokens[start : start + n] == last:
                return tokens[start + n : start + n + k]
    return []


def keep_matching(plan: StepPlan, drawn: list[list[SampledToken]]) -> list[list[SampledToken]]:
    """One list for each plan row with samples, from `drawn`, which has one for each row of the logits (`plan.groups`).

    A row with drafts keeps its draws as long as each is what was drafted there, and the first that isn't, or else the last.
    """
    tokens = iter(drawn)
    kept = []
    for row in plan.rows:
        if row.samples:
            own = [next(tokens), *(next(tokens) for _ in row.drafts)]
            kept.append([token for draws in own[: 1 + num_matching(row.drafts, own)] for token in draws])
    return kept


def num_matching(drafts: Many[int], drawn: Many[list[SampledToken]]) -> int:
    """How many drafts, from the first on, are what was drawn in their place."""
    wrong = (n for n, draft in enumerate(drafts) if drawn[n][0].token_id != draft)
    return next(wrong, len(drafts))


def accept_drafts(
    drafts: Many[int],
    target: Many[NDArray[np.float64]],
    proposed: Many[NDArray[np.float64]],
    tests: Many[float],
    draws: Many[float],
) -> list[int]:
    """The tokens of a row: each is distributed as `target` alone has it, whatever `proposed` the drafts.

    `target` [k + 1] and `proposed` [k] are probabilities [V]; draft i was drawn from `proposed[i]`. `tests` [k] and `draws`
    [k + 1] are independent and uniform in [0, 1). Draft i is kept with probability min(1, p / q). The first that isn't
    is drawn anew from what p has more than q; if all are kept, one more is drawn from the last p.
    """
    for i, draft in enumerate(drafts):
        if tests[i] * proposed[i][draft] >= target[i][draft]:
            return [*drafts[:i], choose(residual(target[i], proposed[i]), draws[i])]
    return [*drafts, choose(target[len(drafts)], draws[len(drafts)])]


def residual(target: NDArray[np.float64], proposed: NDArray[np.float64]) -> NDArray[np.float64]:
    """What `target` [V] has more than `proposed` [V], up to a factor: the distribution of a token whose draft was refused.

    Where rounding leaves nothing, the two are the same, and so is what to draw from.
    """
    rest = np.maximum(target - proposed, 0)
    return rest if rest.any() else target

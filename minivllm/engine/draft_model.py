"""A smaller model that guesses tokens for a larger one, in the same blocks.

Whatever a step runs, the draft model runs first, with its own KV tensors behind the same block ids: prompts, chunks,
copies, host memory. So a block that is shared, copied or hit holds the KV of both models, and nobody keeps books twice. The
scheduler has planned room for drafts without knowing them; here they are drawn, one forward a draft, into the row's own
slots.

In the leading engine (vLLM 0.32, `v1/spec_decode/draft_model.py`) a draft model shares block tables in the same way; it
runs after the target, into slots allocated in advance (`num_lookahead_tokens`), so that drafts are known a step earlier.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minivllm.engine.core import Runner, StepResult
from minivllm.plan import Row, StepPlan
from minivllm.request import SampledToken, Sequence
from minivllm.sample.random import uniforms
from minivllm.sample.sampler import Sampler, choose, distribution, with_logprobs
from minivllm.sample.spec import ACCEPT, PROPOSE, accept_drafts, keep_matching


class DraftSpeculation:
    """A `Runner` around the target's that fills in drafts before it runs, and judges them afterwards.

    Guesses don't know penalties, biases and grammars: where those decide, fewer are right.
    """

    def __init__(self, target: Runner, draft: Runner, sampler: Sampler, num_drafts: int) -> None:
        self.target, self.draft, self.sampler, self.num_drafts = target, draft, sampler, num_drafts
        self._proposed: dict[int, list[NDArray[np.float64]]] = {}

    def propose(self, sequence: Sequence) -> list[int]:
        """Ask for room alone: which drafts they are is known when the step runs."""
        return [-1] * self.num_drafts

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan in both models, and draw its drafts in between."""
        self._proposed.clear()
        logits = self.draft.execute(replace(plan, rows=[_without_drafts(row) for row in plan.rows])).logits
        rows, n = [row for row in plan.rows if row.drafts], 0
        while rows:
            for row, row_logits in zip(rows, logits, strict=True):
                token = self._draw(row.after_drafts(n), row_logits)
                row.drafts = (*row.drafts[:n], token, *row.drafts[n + 1 :])
            n += 1
            rows = [row for row in rows if len(row.drafts) > n]
            if rows:
                logits = self.draft.execute(StepPlan(plan.step, [_last_draft(row, n) for row in rows])).logits
        return self.target.execute(plan)

    def _draw(self, sequence: Sequence, logits: Tensor) -> int:
        params = sequence.request.params
        if params.greedy:
            return int(logits.argmax())
        probabilities = distribution(logits.cpu().numpy(), params)
        self._proposed.setdefault(sequence.uid, []).append(probabilities)
        number = uniforms([self.sampler.key(sequence)], [len(sequence.output_token_ids)], PROPOSE)[0]
        return choose(probabilities, float(number))

    def verify(self, logits: Tensor, plan: StepPlan, drawn: list[list[SampledToken]]) -> list[list[SampledToken]]:
        """The tokens of each plan row with samples, given `logits` and draws for each row of those (`plan.groups`)."""
        kept, first = keep_matching(plan, drawn), 0
        for number, row in enumerate(row for row in plan.rows if row.samples):
            own = logits[first : first + 1 + len(row.drafts)]
            first += len(own)
            if row.sequence.uid in self._proposed:
                kept[number] = self._accept(row, own)
        return kept

    def _accept(self, row: Row, logits: Tensor) -> list[SampledToken]:
        """The tokens of a sampled row, by rejection; `logits` is [1 + drafts, V]."""
        sequences = [row.after_drafts(n) for n in range(len(logits))]
        keys = [self.sampler.key(row.sequence)] * len(logits)
        positions = [len(sequence.output_token_ids) for sequence in sequences]
        tests, draws = uniforms(keys, positions, ACCEPT).tolist(), uniforms(keys, positions).tolist()
        target = self.sampler.distributions(logits, sequences)
        tokens = accept_drafts(row.drafts, target, self._proposed[row.sequence.uid], tests, draws)
        return with_logprobs(tokens, logits[: len(tokens)], sequences[: len(tokens)])


def _without_drafts(row: Row) -> Row:
    """The row as the draft model runs it; one of a sequence that has begun to answer begins a token earlier.

    That one may have been the last draft of the step before. It was right, and the draft model had no reason to run it.
    """
    early = min(row.start, bool(row.sequence.output_token_ids))
    num_tokens = row.num_tokens - len(row.drafts) + early
    return replace(
        row, start=row.start - early, num_tokens=num_tokens, drafts=(), samples=row.samples if row.drafts else ()
    )


def _last_draft(row: Row, n: int) -> Row:
    """A row that runs draft number `n` alone, counted from 1."""
    sequence = row.after_drafts(n)
    return Row(sequence, row.start + n, 1, row.block_ids, (sequence,))

"""From logits to the next tokens of beams: the part of a beam search that sees tensors."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many

from torch import Tensor

from minivllm.request import Request, SampledToken, Sequence
from minivllm.sample.beam import choose_beams, num_candidates
from minivllm.sample.logprobs import top_logprobs
from minivllm.sample.sampler import Sampler, require_finite


class BeamSampler:
    """Draws for ordinary requests as `sampler` does; for a request with beams it chooses among the candidates of all.

    All live beams of a request must be there in the same step: the scheduler sees to that.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def sample(self, logits: Tensor, groups: Many[tuple[Sequence, ...]]) -> list[list[SampledToken]]:
        """As `Sampler.sample`: one token for each sequence of `groups`; `logits` is float32 [R, V], R == len(groups)."""
        searches = rows_of_searches(groups)
        if not searches:
            return self.sampler.sample(logits, groups)
        plain = [i for i, group in enumerate(groups) if group[0].request.beams is None]
        drawn = dict(zip(plain, self.sampler.sample(logits[plain], [groups[i] for i in plain]), strict=True))
        for request, rows in searches:
            drawn.update(self._search(request, logits, rows, groups))
        return [drawn[i] for i in range(len(groups))]

    def _search(
        self, request: Request, logits: Tensor, rows: list[int], groups: Many[tuple[Sequence, ...]]
    ) -> dict[int, list[SampledToken]]:
        """The tokens of one request's rows. A trunk's row has all beams in its group, any other its own beam."""
        parents, children = [groups[i][0] for i in rows], [s for i in rows for s in groups[i]]
        require_finite(logits[rows].amax(1), parents)
        ends: Collection[int] = () if request.params.ignore_eos else self.sampler.eos_token_ids
        offered = top_logprobs(logits[rows], num_candidates(len(children), len(ends)))
        tokens = iter(choose_beams(parents, children, offered, ends))
        return {i: [next(tokens) for _ in groups[i]] for i in rows}


def rows_of_searches(groups: Many[tuple[Sequence, ...]]) -> list[tuple[Request, list[int]]]:
    """The requests with beams among `groups`, each with the numbers of its rows."""
    rows: dict[str, tuple[Request, list[int]]] = {}
    for i, group in enumerate(groups):
        request = group[0].request
        if request.beams is not None:
            rows.setdefault(request.id, (request, []))[1].append(i)
    return list(rows.values())

"""What a request has left to run: the deficit between tokens computed and tokens to compute, for whom, in a step."""

from __future__ import annotations

from minivllm.request import Request, Sequence


def runnable(request: Request, budget: int) -> list[Sequence]:
    """The sequences that a step may run: only the trunk until the prompt's KV exists; then all beams draw, or none.

    One whose last token is on its way, by its length, needs no more steps.
    """
    if not request.forked:
        return request.live[:1]
    together = request.beams is not None and abreast(request)
    if together and budget < len(request.live):
        return []
    return [s for s in request.live if len(s.output_token_ids) + s.num_placeholders < request.max_tokens]


def target(sequence: Sequence) -> int:
    """How many tokens to compute before drawing or forking: the prompt for a trunk, else all known or on their way.

    Beams that catch up after a preemption wait for each other one token before the end.
    """
    request = sequence.request
    if not request.forked:
        return sequence.num_prompt
    return sequence.num_expected + len(sequence.drafts) - (request.beams is not None and not abreast(request))


def draft_room(sequence: Sequence) -> int:
    """The most drafts that a sequence has a use for: none unless it has one token to compute, and never its last one.

    What follows the last token is nobody's matter, so with drafts a sequence needs no more slots than without.
    """
    request = sequence.request
    decodes = request.forked and request.beams is None and sequence.num_tokens - sequence.num_computed == 1
    return request.max_tokens - len(sequence.output_token_ids) - 1 if decodes else 0


def abreast(request: Request) -> bool:
    """Whether every live beam has only its last token to compute. One alone is always abreast of itself."""
    live = request.live
    return len(live) == 1 or all(s.num_tokens - s.num_computed == 1 for s in live)

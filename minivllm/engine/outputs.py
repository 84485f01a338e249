"""Token ids to text, as they come: detokenise, look for stop strings, hand each request's sink what is new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from minivllm.request import (
    CompletionOutput,
    FinishReason,
    Hypothesis,
    Request,
    RequestMetrics,
    RequestOutput,
    SampledToken,
    Sequence,
)
from minivllm.sample.beam import finished_answers, is_done
from minivllm.sample.detok import IncrementalDetokenizer
from minivllm.sample.stop import StopChecker
from minivllm.sched.scheduler import Scheduler

Sink = Callable[[RequestOutput | Exception], object]
"""Hears how a request goes on; an exception, instead of its last output, says why it can't."""


@dataclass(slots=True)
class TextState:
    """The text of one sequence: what the user may see (`text`), of which `sent` characters were handed over."""

    detokenizer: IncrementalDetokenizer
    stops: StopChecker
    text: str = ""
    sent: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class Listener:
    """A request that somebody waits for."""

    request: Request
    sink: Sink
    stream: bool
    texts: list[TextState] = field(default_factory=list)


class OutputProcessor:
    """Follows the tokens of all live requests. `token_bytes` maps a token id to the bytes it stands for."""

    def __init__(self, token_bytes: Callable[[int], bytes], special_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._listeners: dict[str, Listener] = {}

    def register(self, request: Request, sink: Sink, *, stream: bool) -> None:
        """Follow a request; `sink` is called with every step's output, or only with the last one.

        A beam search has no output before the last: which of its tokens are part of an answer is open until then.
        """
        skip = self._special_ids if request.params.skip_special_tokens else frozenset()
        listener = Listener(request, sink, stream)
        for _ in request.sequences:
            stops = StopChecker(request.params.stop, include=request.params.include_stop_str_in_output)
            listener.texts.append(TextState(IncrementalDetokenizer(self._token_bytes, skip), stops))
        self._listeners[request.id] = listener

    def forget(self, request_id: str) -> None:
        """Stop following a request; its sink is not called again."""
        self._listeners.pop(request_id, None)

    def fail(self, request_id: str, error: Exception) -> None:
        """Tell a request's sink that it is over, and why."""
        self._listeners.pop(request_id).sink(error)

    def process(self, appended: list[tuple[Sequence, SampledToken]], scheduler: Scheduler, now: float) -> None:
        """Turn a step's new tokens into text, end sequences at stop strings, and call the sinks."""
        touched: dict[str, Listener] = {}
        for sequence, token in appended:
            request = sequence.request
            listener = self._listeners[request.id]
            touched[request.id] = listener
            if request.first_token_time is None:
                request.first_token_time = now
            if request.beams is None:
                self._advance(listener.texts[sequence.index], sequence, token.token_id, scheduler)
        for listener in touched.values():
            _end_early(listener.request, scheduler)
            self._deliver(listener, now)

    def _advance(self, state: TextState, sequence: Sequence, token_id: int, scheduler: Scheduler) -> None:
        """Add a token to a text. A step may have brought several: what is known of the sequence may lie ahead of it."""
        params = sequence.request.params
        if state.num_tokens == len(sequence.output_token_ids):
            return  # a stop string ended the text before this token
        state.num_tokens += 1
        ended = sequence.finished and state.num_tokens == len(sequence.output_token_ids)
        by_token = ended and sequence.finish_reason is FinishReason.STOP
        piece = "" if by_token and not params.include_stop_str_in_output else state.detokenizer.push(token_id)
        if ended:
            piece += state.detokenizer.finish()
        active = state.num_tokens > params.min_tokens
        text, stop = state.stops.feed(piece, final=ended, active=active)
        state.text += text
        if stop is None or by_token:
            return
        del sequence.output_token_ids[state.num_tokens :], sequence.logprobs[state.num_tokens :]
        if sequence.finished:  # by a token that came in the same step
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop
        else:
            scheduler.stop(sequence, stop)

    def _deliver(self, listener: Listener, now: float) -> None:
        request = listener.request
        if request.finished:
            request.finish_time = now
            self.forget(request.id)
        if request.finished or (listener.stream and request.beams is None):
            listener.sink(_output(listener))


def _end_early(request: Request, scheduler: Scheduler) -> None:
    """End a beam search that has found enough."""
    if request.beams is not None and is_done(request.hypotheses, request.beams):
        for sequence in request.live:
            scheduler.stop(sequence, "early_stopping")


def _output(listener: Listener) -> RequestOutput:
    request = listener.request
    metrics = RequestMetrics(
        request.arrival_time,
        request.first_token_time,
        request.finish_time,
        request.num_cached_tokens,
        request.num_preemptions,
        *request.peak_blocks,
        request.num_drafts,
        request.num_accepted,
    )
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt_text,
        prompt_token_ids=tuple(request.prompt_token_ids),
        outputs=_completions(listener),
        finished=request.finished,
        metrics=metrics,
        prompt_logprobs=tuple(request.prompt_logprobs) if request.params.prompt_logprobs is not None else None,
    )


def _completions(listener: Listener) -> tuple[CompletionOutput, ...]:
    request, texts = listener.request, listener.texts
    if request.beams is None:
        return tuple(_completion(s, t) for s, t in zip(request.sequences, texts, strict=True))
    return tuple(_beam_completion(i, h, texts[i].detokenizer) for i, h in enumerate(finished_answers(request)))


def _beam_completion(index: int, answer: Hypothesis, detokenizer: IncrementalDetokenizer) -> CompletionOutput:
    """One answer of a beam search; the token that ended it is not shown. `detokenizer` is a fresh one."""
    shown = answer.token_ids[:-1] if answer.finish_reason is FinishReason.STOP else answer.token_ids
    text = "".join(map(detokenizer.push, shown)) + detokenizer.finish()
    return CompletionOutput(
        index=index,
        text=text,
        delta=text,
        token_ids=answer.token_ids,
        cumulative_logprob=answer.cumulative_logprob,
        finish_reason=answer.finish_reason,
        score=answer.score,
    )


def _completion(sequence: Sequence, state: TextState) -> CompletionOutput:
    delta, state.sent = state.text[state.sent :], len(state.text)
    wanted = sequence.request.params.logprobs is not None
    return CompletionOutput(
        index=sequence.index,
        text=state.text,
        delta=delta,
        token_ids=tuple(sequence.output_token_ids),
        cumulative_logprob=sum(lp.logprob for lp in sequence.logprobs) if wanted else None,
        logprobs=tuple(sequence.logprobs) if wanted else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )

"""Token ids to text, as they come: detokenise, look for stop strings, hand each request's sink what is new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from minivllm.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    SampledToken,
    Sequence,
)
from minivllm.sample.detok import IncrementalDetokenizer
from minivllm.sample.stop import StopChecker
from minivllm.sched.scheduler import Scheduler

Sink = Callable[[RequestOutput], object]


@dataclass(slots=True)
class TextState:
    """The text of one sequence: what the user may see (`text`), of which `sent` characters were handed over."""

    detokenizer: IncrementalDetokenizer
    stops: StopChecker
    text: str = ""
    sent: int = 0


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
        """Follow a request; `sink` is called with every step's output, or only with the last one."""
        skip = self._special_ids if request.params.skip_special_tokens else frozenset()
        listener = Listener(request, sink, stream)
        for _ in request.sequences:
            stops = StopChecker(request.params.stop, include=request.params.include_stop_str_in_output)
            listener.texts.append(TextState(IncrementalDetokenizer(self._token_bytes, skip), stops))
        self._listeners[request.id] = listener

    def forget(self, request_id: str) -> None:
        """Stop following a request; its sink is not called again."""
        self._listeners.pop(request_id, None)

    def process(self, appended: list[tuple[Sequence, SampledToken]], scheduler: Scheduler, now: float) -> None:
        """Turn a step's new tokens into text, end sequences at stop strings, and call the sinks."""
        touched: dict[str, Listener] = {}
        for sequence, token in appended:
            request = sequence.request
            listener = self._listeners[request.id]
            touched[request.id] = listener
            if request.first_token_time is None:
                request.first_token_time = now
            self._advance(listener.texts[sequence.index], sequence, token.token_id, scheduler)
        for listener in touched.values():
            self._deliver(listener, now)

    def _advance(self, state: TextState, sequence: Sequence, token_id: int, scheduler: Scheduler) -> None:
        params = sequence.request.params
        by_token = sequence.finish_reason is FinishReason.STOP
        piece = "" if by_token and not params.include_stop_str_in_output else state.detokenizer.push(token_id)
        if sequence.finished:
            piece += state.detokenizer.finish()
        active = len(sequence.output_token_ids) > params.min_tokens
        text, stop = state.stops.feed(piece, final=sequence.finished, active=active)
        state.text += text
        if stop is None or by_token:
            return
        if sequence.finished:  # its last token both reached the length and completed a stop string
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop
        else:
            scheduler.stop(sequence, stop)

    def _deliver(self, listener: Listener, now: float) -> None:
        request = listener.request
        if request.finished:
            request.finish_time = now
            self.forget(request.id)
        if listener.stream or request.finished:
            listener.sink(_output(listener))


def _output(listener: Listener) -> RequestOutput:
    request = listener.request
    metrics = RequestMetrics(
        request.arrival_time,
        request.first_token_time,
        request.finish_time,
        request.num_cached_tokens,
        request.num_preemptions,
    )
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt_text,
        prompt_token_ids=tuple(request.prompt_token_ids),
        outputs=tuple(_completion(s, t) for s, t in zip(request.sequences, listener.texts, strict=True)),
        finished=request.finished,
        metrics=metrics,
        prompt_logprobs=tuple(request.prompt_logprobs) if request.params.prompt_logprobs is not None else None,
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

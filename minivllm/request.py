"""What a user asks for and what comes back: sampling parameters, requests, sequences, outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Annotated

from minivllm.config import Count, CountOrZero, Must, Number, RequestError, Whole, at_least, check_fields, check_value


def within(low: float, high: float) -> Must:
    """A rule for numbers: both ends are allowed."""
    return Must(f"be in [{low}, {high}]", lambda value: low <= value <= high)


Penalty = Annotated[Number, within(-2, 2)]
Bias = Annotated[Number, within(-100, 100)]
NumLogprobs = Annotated[Whole, within(0, 100)]


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the user left


class Status(StrEnum):
    """Where a request is. Preempted requests wait again, with nothing computed."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"  # lets others pass until its grammar is compiled
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class GuidedChoice:
    """The answer is one of these texts."""

    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        choices = self.choices
        if not (isinstance(choices, (list, tuple)) and choices and all(isinstance(choice, str) for choice in choices)):
            raise RequestError("guided", choices, "choices must be a list of at least one text")
        object.__setattr__(self, "choices", tuple(choices))


@dataclass(frozen=True, slots=True)
class GuidedRegex:
    """The whole answer matches this pattern. Which syntax is known: `sample/grammar/regex.py`."""

    pattern: str

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise RequestError("guided", self.pattern, "the pattern must be a text")


@dataclass(frozen=True, slots=True)
class GuidedJson:
    """The answer is one JSON document that this JSON schema allows; without a schema, any document.

    `schema` is given as what JSON calls an object or as its text, and kept as text. Which keywords are known:
    `sample/grammar/schema.py`.
    """

    schema: str | Mapping[str, object] = "{}"

    def __post_init__(self) -> None:
        if isinstance(self.schema, str):
            return
        try:
            object.__setattr__(self, "schema", json.dumps(self.schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError("guided", "schema", f"must be JSON: {error}") from error


Guided = GuidedChoice | GuidedRegex | GuidedJson


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. `temperature=0` is greedy.

    `seed` makes draws repeatable whatever else is in the batch; child i of `n` draws with seed + i.
    `logprobs=k` returns the k most likely tokens beside each chosen one, fewer where `guided` allows fewer;
    `prompt_logprobs` the same for the prompt.
    `guided` says what an answer must look like; it does whenever it ends with `FinishReason.STOP`. It ends where the
    guide says: nothing else may stop it, and where the guide allows no more text, `min_tokens` gives way.
    """

    temperature: Annotated[Number, at_least(0)] = 1.0
    top_p: Annotated[Number, Must("be in (0, 1]", lambda share: 0 < share <= 1)] = 1.0
    top_k: CountOrZero = 0
    min_p: Annotated[Number, within(0, 1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[Number, within(0.01, 100)] = 1.0
    logit_bias: Mapping[int, Bias] = field(default_factory=dict)
    seed: Annotated[Whole, within(0, 2**63 - 1)] | None = None
    max_tokens: Count | None = None
    min_tokens: CountOrZero = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: Count = 1
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    guided: Guided | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        check_fields(self, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        if any(not text for text in self.stop):
            raise RequestError("stop", self.stop, "stop strings must not be empty")
        for token, bias in self.logit_bias.items():
            check_value(f"logit_bias[{token}]", bias, Bias, RequestError)
        if self.guided is not None:
            self._check_guided()

    def _check_guided(self) -> None:
        if not isinstance(self.guided, Guided):
            raise RequestError("guided", self.guided, "must be a GuidedChoice, a GuidedRegex or a GuidedJson")
        for name in ("stop", "stop_token_ids", "ignore_eos"):
            if value := getattr(self, name):
                raise RequestError(name, value, "can't go with guided, which alone decides where an answer ends")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How to search for likely answers: `width` beams side by side, for at most `max_tokens` tokens.

    Answers are compared by the sum of their log-probabilities over `length ** length_penalty`: see `sample/beam.py`.
    With `early_stopping` the search ends when `width` answers are complete. With `ignore_eos` an end-of-sequence token
    completes nothing.
    """

    width: Count = 4
    max_tokens: Count = 64
    length_penalty: Annotated[Number, within(-10, 10)] = 1.0
    early_stopping: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_fields(self, RequestError)

    @property
    def sampling(self) -> SamplingParams:
        """The same as parameters of a request: `width` sequences that start from one prompt."""
        return SamplingParams(temperature=0, n=self.width, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen (or prompt) token's log-probability, its rank (1 = most likely), and the most likely tokens there."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token; `logprob` only where the request asked for it.

    `parent` is set in a beam search only, where a sequence goes on from another's tokens instead of its own: its index.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete answer of a beam search: its tokens, the one that ended it included, and how good it is."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens of a request: its prompt and what was generated after it.

    Two counters drive the engine: `num_tokens` known and `num_computed` of them with KV in the cache. A step runs
    some of the difference; prefill, decode and the recomputation after a preemption are the same thing. Where steps are
    planned ahead, `num_placeholders` more tokens are on their way: see `sched/async_sched.py`.
    """

    request: Request
    index: int  # 0 .. n - 1 within the request
    uid: int = -1  # unique in the engine's life: set by the scheduler
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    most_computed: int = 0  # before a preemption: what is run below this is run again
    num_placeholders: int = 0  # tokens drawn by steps on their way
    drafts: list[int] = field(default_factory=list)  # proposed for the next step; -1: known when it runs
    last_drawn: int = -1  # the newest token drawn, which its worker sets before the scheduler hears of it
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_expected(self) -> int:
        """Tokens known or on their way."""
        return self.num_tokens + self.num_placeholders

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start .. stop - 1, prompt and output as one."""
        prompt, split = self.request.prompt_token_ids, self.num_prompt
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return prompt[start:stop] + self.output_token_ids[: max(stop - split, 0)]

    def __repr__(self) -> str:
        return f"<{self.request.id}/{self.index} computed {self.num_computed} of {self.num_tokens}>"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its parameters and its n sequences: the unit of admission and preemption.

    Until the prompt's KV exists only the first live sequence runs (the trunk); then the others fork from it.
    With `beams` the sequences are the live beams of a search: they step together and fork from each other all the time.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    _: KW_ONLY
    max_tokens: int  # resolved: params.max_tokens capped by the context that is left
    priority: int = 0  # smaller is more important
    arrival_time: float = 0.0
    cache_salt: str = ""
    prompt_text: str | None = None
    beams: BeamParams | None = None  # then params.n is its width
    status: Status = Status.WAITING
    forked: bool = field(init=False)
    sequences: list[Sequence] = field(init=False)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0  # proposed tokens that were run, and those of them that were right
    num_accepted: int = 0
    hypotheses: list[Hypothesis] = field(default_factory=list)  # answers completed so far, the best `width` of them
    peak_blocks: tuple[int, int] = (0, 0)  # most KV blocks that the beams held together, and that without sharing
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self) -> None:
        self.forked = self.params.n == 1
        self.sequences = [Sequence(self, i) for i in range(self.params.n)]

    @property
    def live(self) -> list[Sequence]:
        """Sequences that still want tokens."""
        return [s for s in self.sequences if s.finish_reason is None]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return f"<request {self.id} {self.status} {self.sequences}>"


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's n answers so far. `text` and `token_ids` are whole, `delta` what is new since the last output."""

    index: int
    text: str
    delta: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None  # of a beam search: what its answers are sorted by


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds on the engine's clock, and counts of tokens.

    Of a beam search alone: the most KV blocks that its beams held, and what they would have held without sharing.
    """

    arrival_time: float
    first_token_time: float | None
    finish_time: float | None
    num_cached_tokens: int
    num_preemptions: int
    peak_blocks: int = 0
    peak_unshared_blocks: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token, in seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Where a request stands after a step, or in the end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

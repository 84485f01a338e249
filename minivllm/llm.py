"""The front door: `LLM.generate`, `LLM.chat`, `LLM.beam_search`, and `LLM.stream` for tokens as they come."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any, Literal

from minivllm.config import EngineConfig, RequestError
from minivllm.engine.startup import Engine, start_engine
from minivllm.models.chat import render_chat
from minivllm.request import BeamParams, Request, RequestOutput, SamplingParams
from minivllm.sample.beam import num_candidates

Prompt = str | list[int]
Params = SamplingParams | BeamParams
Message = Mapping[str, str]


class LLM:
    """A model behind the engine. `model` is None (the default model), a GGUF file, a safetensors folder or a hub id.

    All methods share one engine: requests of several callers run in the same batches.
    """

    def __init__(
        self, model: str | Path | None = None, config: EngineConfig | None = None, *, engine: Engine | None = None
    ) -> None:
        self.engine = engine or start_engine(model, config or EngineConfig())
        self._ids = itertools.count()
        self._stepper: asyncio.Task[None] | None = None
        self._streams: set[asyncio.Queue[RequestOutput | BaseException]] = set()

    @property
    def tokenizer(self):  # type: ignore[no-untyped-def]
        return self.engine.tokenizer

    def request(self, prompt: Prompt, params: Params, *, priority: int = 0, cache_salt: str = "") -> Request:
        """Tokenise and check a prompt; raises `RequestError` if it is empty or leaves no room in the context."""
        beams = params if isinstance(params, BeamParams) else None
        if isinstance(params, BeamParams):
            self._check_width(params)
            params = params.sampling
        text = prompt if isinstance(prompt, str) else None
        ids = self.engine.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_tokens(ids, params)
        room = self.engine.kv_memory.max_model_len - len(ids)
        return Request(
            f"r{next(self._ids)}",
            ids,
            params,
            max_tokens=min(params.max_tokens or room, room),
            priority=priority,
            cache_salt=cache_salt,
            prompt_text=text,
            beams=beams,
        )

    def _check_width(self, params: BeamParams) -> None:
        vocab = self.engine.model_config.vocab_size
        ends = 0 if params.ignore_eos else len(self.engine.sampler.eos_token_ids)
        if (needed := num_candidates(params.width, ends)) > vocab:
            raise RequestError("width", params.width, f"needs {needed} candidates a beam, there are {vocab} tokens")

    def _check_tokens(self, ids: list[int], params: SamplingParams) -> None:
        longest = self.engine.kv_memory.max_model_len - 1
        if not 1 <= len(ids) <= longest:
            raise RequestError(
                "prompt", f"{len(ids)} tokens", f"must have 1 to {longest} tokens to leave room for an answer"
            )
        vocab = self.engine.model_config.vocab_size
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise RequestError("prompt", max(ids, key=abs), f"token ids must be in [0, {vocab})")
        self.engine.sampler.check(params)
        self.engine.core.grammars.check(params)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: Params | Seq[Params] | None = None,
        *,
        errors: Literal["raise", "return"] = "raise",
        on_step: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput | RequestError]:
        """Answer all prompts, in one continuous batch; results in the order of the prompts.

        `params` are the same for all, or a list with one for each; a prompt with `BeamParams` is searched.
        A bad prompt raises `RequestError` before anything runs (for a guide that is too large, as soon as that is known),
        or with `errors="return"` takes its place among the results while the others run. `on_step(done, total)` is
        called after every step, for progress bars.
        """
        listed = _as_list(prompts)
        each = list(params) if isinstance(params, Seq) else [params or SamplingParams()] * len(listed)
        if len(each) != len(listed):
            raise RequestError("params", f"{len(each)} given", f"must be one, or one for each of {len(listed)} prompts")
        return self._run([self._attempt(p, q) for p, q in zip(listed, each, strict=True)], errors, on_step)

    def beam_search(
        self, prompts: Prompt | Seq[Prompt], params: BeamParams | None = None, **options: Any
    ) -> list[RequestOutput | RequestError]:
        """The likeliest answers to each prompt, best first: `width` outputs each, with `score` and `cumulative_logprob`.

        All prompts run in one continuous batch; a prompt's beams share the KV blocks of what they have in common.
        Options as in `generate`.
        """
        if not isinstance(params or BeamParams(), BeamParams):
            raise RequestError("params", params, "must be BeamParams, the same for all prompts")
        return self.generate(prompts, params or BeamParams(), **options)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: Params | Seq[Params] | None = None,
        **options: Any,
    ) -> list[RequestOutput | RequestError]:
        """Answer one conversation or several, each a list of {"role", "content"}; options as in `generate`."""
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(m) for m in several], params, **options)  # type: ignore[arg-type]

    def chat_prompt(self, messages: Seq[Message]) -> str:
        """The prompt that the model's chat template makes of a conversation."""
        return render_chat(self.engine.tokenizer, messages)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """Yield a `RequestOutput` after every step that brought this request tokens. Leaving the loop early aborts the request."""
        request = self.request(prompt, params or SamplingParams(), priority=priority, cache_salt=cache_salt)
        queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        core = self.engine.core
        await asyncio.to_thread(
            core.add, request, lambda out: loop.call_soon_threadsafe(queue.put_nowait, out), stream=True
        )
        self._streams.add(queue)
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_until_idle())
        try:
            while True:
                output = await queue.get()
                if isinstance(output, BaseException):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            self._streams.discard(queue)
            await asyncio.shield(asyncio.to_thread(core.abort, request.id))

    async def _step_until_idle(self) -> None:
        """Step the engine for all streams; a failed step reaches every one."""
        try:
            while self.engine.core.has_requests:
                await asyncio.to_thread(self.engine.core.step)
        except BaseException as error:
            for queue in self._streams:
                queue.put_nowait(error)

    # offline runs

    def _attempt(self, prompt: Prompt, params: Params) -> Request | RequestError:
        """The request, or why there can be none."""
        try:
            request = self.request(prompt, params)
            self.engine.core.scheduler.check(request)
        except RequestError as error:
            return error
        return request

    def _run(
        self, requests: list[Request | RequestError], errors: str, on_step: Callable[[int, int], None] | None
    ) -> list[RequestOutput | RequestError]:
        """Step until all requests are done. Interrupted, it aborts what it started and leaves the engine usable."""
        _raise_failure(requests, errors)
        results: dict[str, RequestOutput | RequestError] = {}
        started = [r for r in requests if isinstance(r, Request)]
        core = self.engine.core
        try:
            for request in started:
                core.add(request, partial(results.__setitem__, request.id))
            while len(results) < len(started):
                core.step()
                _raise_failure(results.values(), errors)
                if on_step is not None:
                    on_step(len(results), len(started))
        finally:
            for request in started:
                if request.id not in results:
                    core.abort(request.id)
        return [results[r.id] if isinstance(r, Request) else r for r in requests]


def _raise_failure(results: Iterable[Request | RequestOutput | Exception], errors: str) -> None:
    """Raise what kept a request from starting or ended it early, unless it is its own fault and shall be returned."""
    for result in results:
        if isinstance(result, Exception) and not (errors == "return" and isinstance(result, RequestError)):
            raise result


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt is a string or a list of token ids; several are a list of those."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

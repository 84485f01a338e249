"""One answer, token by token, and the line that says what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.cli.cache_view import TableView, tables_of
from minivllm.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from minivllm.llm import LLM


@dataclass(frozen=True, slots=True)
class Cost:
    """What an answer took. Times in seconds; `blocks` are the KV blocks that its tokens filled, at most, and
    `unshared_blocks` those that they would have filled if several answers had not shared what they have in common."""

    ttft: float
    tokens_per_second: float | None
    new_tokens: int
    prompt_tokens: int
    cached_tokens: int
    blocks: int
    unshared_blocks: int
    usable_blocks: int
    num_drafts: int = 0
    num_accepted: int = 0

    def __str__(self) -> str:
        speed = "" if self.tokens_per_second is None else f" · {self.tokens_per_second:,.1f} tokens/s"
        drafts = f" · drafts accepted {self.num_accepted:,} of {self.num_drafts:,}" if self.num_drafts else ""
        return (
            f"TTFT {self.ttft * 1000:,.0f} ms{speed} · {self.new_tokens:,} tokens · {self.blocks:,} of"
            f" {self.usable_blocks:,} KV blocks · prefix-cache hits {self.cached_tokens:,} of {self.prompt_tokens:,}{drafts}"
        )


def cost_of(output: RequestOutput, llm: LLM) -> Cost:
    """What an output, with at least one token, has cost so far. The last token drawn was never run: it has no slot."""
    metrics, kv = output.metrics, llm.engine.core.scheduler.kv
    lengths = [len(completion.token_ids) for completion in output.outputs]
    prompt, new = len(output.prompt_token_ids), sum(lengths)
    decoding = (metrics.finish_time or 0) - (metrics.first_token_time or 0)
    shared = prompt // kv.block_size if len(lengths) > 1 else 0
    alone = [kv.blocks_for(prompt + n - 1) for n in lengths]
    return Cost(
        ttft=metrics.ttft or 0,
        tokens_per_second=(new - len(lengths)) / decoding if decoding > 0 else None,
        new_tokens=new,
        prompt_tokens=prompt,
        cached_tokens=metrics.num_cached_tokens,
        blocks=metrics.peak_blocks or shared + sum(n - shared for n in alone),
        unshared_blocks=metrics.peak_unshared_blocks or sum(alone),
        usable_blocks=kv.pool.num_usable,
        num_drafts=metrics.num_drafts,
        num_accepted=metrics.num_accepted,
    )


class Answer:
    """A request that is being answered by the engine, with nobody else stepping it.

    Iterate to get an output after every step; `stop` is asked between steps and ends the answer early. Afterwards
    `last` is the newest output and `tables` are the block tables as they were before the last step gave them back.
    """

    def __init__(
        self, llm: LLM, prompt: str | list[int], params: SamplingParams, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.llm = llm
        self.request = llm.request(prompt, params)
        self.tables: list[TableView] = []
        self.last: RequestOutput | None = None
        self._stop = stop

    def __iter__(self) -> Iterator[RequestOutput]:
        """Raises `RequestError` if the request can never run."""
        core, outputs = self.llm.engine.core, list[RequestOutput | Exception]()
        core.add(self.request, outputs.append, stream=True)
        try:
            while not self.request.finished and not self._stop():
                core.step()
                self.tables = tables_of([self.request], core.scheduler.kv) or self.tables
                for output in outputs:
                    if isinstance(output, Exception):
                        raise output
                    self.last = output
                    yield output
                outputs.clear()
        finally:
            core.abort(self.request.id)

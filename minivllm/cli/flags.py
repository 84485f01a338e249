"""The flags that commands share. A dataclass is a group of flags: `with_flags` gives a command one for each field."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from minivllm.config import ConfigError, EngineConfig
from minivllm.request import SamplingParams

MODEL_HELP = (
    "A GGUF file, a folder with safetensors and config.json, or a Hugging Face hub id such as"
    " Qwen/Qwen3-0.6B. Without it: SmolLM2-135M-Instruct, fetched once."
)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
PANELS = "Engine", "KV cache", "Scheduler", "Switches", "Speculation", "Sampling"
EngineOption, CacheOption, SchedulerOption, SwitchOption, SpeculationOption, SamplingOption = (
    partial(Option, rich_help_panel=panel) for panel in PANELS
)
GREEDY = {"temperature": 0.0}
SYSTEM = ""  # the default model answers better when it is told nothing than with its template's own message
System = Annotated[str, Option(metavar="TEXT", help="The system message of a chat.", show_default="empty")]


def parse_size(field: str, text: str) -> int:
    """Bytes in a size such as 512MiB, 2GB or 1.5GiB. Raises `ConfigError` naming `field`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise ConfigError(field, text, "must be a number of bytes with an optional unit, such as 512MiB or 2GB")
    return int(float(match[1]) * UNITS[match[2]])


def parse_length(text: str) -> int | Literal["auto"]:
    """A `max_model_len` in tokens, or auto. Raises `ConfigError`."""
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ConfigError("max_model_len", text, "must be a number of tokens, or auto")
    return int(text)


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """Which model, and the settings of `EngineConfig` that can be given on the command line."""

    model: Annotated[str | None, EngineOption("--model", "-m", help=MODEL_HELP, show_default=False)] = None
    dtype: Annotated[str, EngineOption(metavar="auto|float32|bfloat16", help="Of weights and KV cache.")] = "auto"
    device: Annotated[str, EngineOption(metavar="auto|cpu|cuda", help="Where the model runs.")] = "auto"
    attention_backend: Annotated[
        str,
        EngineOption(
            metavar="NAME",
            help="auto, or one of these: triton and cpp read blocks in place (GPU, CPU), torch needs no kernels, reference"
            " is obviously right.",
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, EngineOption("--tp", metavar="N", help="Split each layer over N processes.")
    ] = 1
    trace_file: Annotated[
        str | None,
        EngineOption(
            "--trace", metavar="FILE", help="Write every decision of the engine as JSON lines; see the trace command."
        ),
    ] = None
    # Declared for --help: `minivllm.cli.main` has taken it out of the arguments, before the engine was imported.
    answers: Annotated[
        list[Path] | None,
        EngineOption(
            "--with",
            metavar="PATH",
            help="Run your answer to an exercise (a file, or a folder of them) inside the engine; may be repeated.",
        ),
    ] = None
    kv_cache_memory: Annotated[
        str | None,
        CacheOption(
            metavar="SIZE", help="Memory for the KV cache, such as 512MiB.", show_default="10% of what is free"
        ),
    ] = None
    num_kv_blocks: Annotated[int | None, CacheOption(help="Blocks in the KV cache, instead of --kv-cache-memory.")] = (
        None
    )
    block_size: Annotated[int, CacheOption(help="Tokens in a KV block.")] = 16
    memory_utilization: Annotated[
        float | None,
        CacheOption(
            metavar="SHARE",
            help="Share of the device's memory to take, weights and all; a profile run finds what is left for KV.",
            show_default=False,
        ),
    ] = None
    max_model_len: Annotated[
        str,
        CacheOption(
            metavar="N|auto", help="Longest prompt and answer together, in tokens; auto: the longest that fits."
        ),
    ] = "auto"
    host_kv_blocks: Annotated[int, CacheOption(help="KV blocks kept in host memory, behind the prefix cache.")] = 0
    max_num_batched_tokens: Annotated[int, SchedulerOption(help="Token budget of a step.")] = 2048
    max_num_seqs: Annotated[int, SchedulerOption(help="Most sequences that run at once.")] = 128
    policy: Annotated[str, SchedulerOption(metavar="NAME", help="Who runs first: fcfs, priority or static.")] = "fcfs"
    long_prefill_threshold: Annotated[
        int, SchedulerOption(help="Most tokens of a sequence in a step while there are other requests; 0: no limit.")
    ] = 0
    watermark: Annotated[
        float,
        SchedulerOption(
            metavar="SHARE", help="Share of the KV blocks left free when a request is admitted, for those that run."
        ),
    ] = 0.0
    preemption: Annotated[
        str,
        SchedulerOption(
            metavar="recompute|swap", help="A preempted request's KV is computed again, or waits in host memory."
        ),
    ] = "recompute"
    async_depth: Annotated[int, SchedulerOption(help="1: plan each step while the one before it runs.")] = 0
    enable_prefix_caching: Annotated[
        bool,
        SwitchOption("--prefix-caching/--no-prefix-caching", help="Re-use KV of prompts that start alike."),
    ] = True
    partial_block_hits: Annotated[
        bool,
        SwitchOption("--partial-block-hits", help="Let a hit end inside a block: the tokens that fit are copied."),
    ] = False
    enable_chunked_prefill: Annotated[
        bool,
        SwitchOption("--chunked-prefill/--no-chunked-prefill", help="Let long prompts run in parts."),
    ] = True
    hybrid: Annotated[
        str, SwitchOption(metavar="on|off", help="off: layers with a sliding window keep the KV of all tokens.")
    ] = "on"
    enforce_eager: Annotated[
        bool,
        SwitchOption(
            "--enforce-eager", help="On a GPU, launch a decode step's kernels one by one, not as a CUDA graph."
        ),
    ] = False
    spec_method: Annotated[
        str,
        SpeculationOption(metavar="none|ngram|draft", help="Who proposes tokens for the model to check in one step."),
    ] = "none"
    spec_tokens: Annotated[int, SpeculationOption(help="Most tokens proposed to a sequence in a step.")] = 4
    spec_ngram_min: Annotated[
        int,
        SpeculationOption(help="ngram: look up at least this many of the last tokens."),
    ] = 2
    spec_ngram_max: Annotated[int, SpeculationOption(help="ngram: look up at most this many of the last tokens.")] = 4
    draft_model: Annotated[
        str | None,
        SpeculationOption(metavar="MODEL", help="The smaller model of --spec-method draft.", show_default=False),
    ] = None

    def config(self, **changes: Any) -> EngineConfig:
        """The engine's configuration; raises `ConfigError` for values it can't run with."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in ENGINE_FIELDS}
        if self.kv_cache_memory is not None:
            values["kv_cache_memory"] = parse_size("kv_cache_memory", self.kv_cache_memory)
        values["max_model_len"] = parse_length(self.max_model_len)
        return EngineConfig(**values | changes)


ENGINE_FIELDS = {f.name for f in dataclasses.fields(EngineConfig)}


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """The settings of `SamplingParams` that can be given on the command line. None: not given, so the command decides."""

    max_tokens: Annotated[int, SamplingOption(help="Most tokens to generate.")] = 512
    temperature: Annotated[
        float | None,
        SamplingOption(help="0 takes the most likely token; higher is more varied.", show_default="0; in a chat 0.2"),
    ] = None
    top_p: Annotated[
        float | None,
        SamplingOption(
            help="Draw from the likeliest tokens that together have this probability.", show_default="1; in a chat 0.9"
        ),
    ] = None
    top_k: Annotated[int, SamplingOption(help="Draw from this many of the likeliest tokens; 0: all.")] = 0
    min_p: Annotated[float, SamplingOption(help="Leave out tokens less likely than this share of the likeliest.")] = 0.0
    seed: Annotated[int | None, SamplingOption(help="Makes draws repeatable.")] = None
    stop: Annotated[
        list[str] | None,
        SamplingOption(metavar="TEXT", help="Stop before this text; may be repeated."),
    ] = None

    def params(self, **more: Any) -> SamplingParams:
        """The sampling parameters; raises `RequestError` for values out of range."""
        given = {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}
        return SamplingParams(**GREEDY | given | {"stop": tuple(self.stop or ())} | more)

    def with_defaults(self, **defaults: Any) -> SamplingFlags:
        """The same flags, with these values where none was given."""
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter of `command` that is typed as a dataclass by its fields, as keyword parameters.

    The command is called with the dataclass built from them, so that ten flags are one argument in its code.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    hints.pop("return", None)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)}
    defaults = inspect.signature(command).parameters
    flat = [p.replace(annotation=hints[name]) for name, p in defaults.items() if name not in groups]
    flat += [parameter for group in groups.values() for parameter in _parameters(group)]

    @wraps(command)
    def call(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)})
        return command(**values)

    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call


def _parameters(group: type) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    for f in dataclasses.fields(group):
        yield inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])

"""The flags that commands share. A dataclass is a group of flags: `with_flags` gives a command one for each field."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from minivllm.config import ConfigError, EngineConfig
from minivllm.request import SamplingParams

MODEL_HELP = (
    "A GGUF file, a folder with safetensors and config.json, or a Hugging Face hub id such as"
    " Qwen/Qwen3-0.6B. Without it: SmolLM2-135M-Instruct, fetched once."
)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
ENGINE, SAMPLING = "Engine", "Sampling"
GREEDY = {"temperature": 0.0}
SYSTEM = ""  # the default model answers better when it is told nothing than with its template's own message
System = Annotated[str, Option(metavar="TEXT", help="The system message of a chat.", show_default="empty")]


def parse_size(field: str, text: str) -> int:
    """Bytes in a size such as 512MiB, 2GB or 1.5GiB. Raises `ConfigError` naming `field`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise ConfigError(field, text, "must be a number of bytes with an optional unit, such as 512MiB or 2GB")
    return int(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """Which model, and the settings of `EngineConfig` that can be given on the command line."""

    model: Annotated[str | None, Option("--model", "-m", help=MODEL_HELP, show_default=False)] = None
    kv_cache_memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Memory for the KV cache, such as 512MiB.",
            show_default="10% of what is free",
            rich_help_panel=ENGINE,
        ),
    ] = None
    num_kv_blocks: Annotated[
        int | None, Option(help="Blocks in the KV cache, instead of --kv-cache-memory.", rich_help_panel=ENGINE)
    ] = None
    block_size: Annotated[int, Option(help="Tokens in a KV block.", rich_help_panel=ENGINE)] = 16
    max_model_len: Annotated[
        int | None,
        Option(
            help="Longest prompt and answer together, in tokens.", show_default="the model's", rich_help_panel=ENGINE
        ),
    ] = None
    max_num_batched_tokens: Annotated[int, Option(help="Token budget of a step.", rich_help_panel=ENGINE)] = 2048
    max_num_seqs: Annotated[int, Option(help="Most sequences that run at once.", rich_help_panel=ENGINE)] = 128
    prefix_caching: Annotated[
        bool,
        Option(
            "--prefix-caching/--no-prefix-caching",
            help="Re-use KV of prompts that start alike.",
            rich_help_panel=ENGINE,
        ),
    ] = True
    chunked_prefill: Annotated[
        bool,
        Option("--chunked-prefill/--no-chunked-prefill", help="Let long prompts run in parts.", rich_help_panel=ENGINE),
    ] = True
    policy: Annotated[str, Option(metavar="fcfs|priority|static", help="Who runs first.", rich_help_panel=ENGINE)] = (
        "fcfs"
    )
    async_depth: Annotated[
        int, Option(help="1: plan each step while the one before it runs.", rich_help_panel=ENGINE)
    ] = 0
    dtype: Annotated[
        str, Option(metavar="auto|float32|bfloat16", help="Of weights and KV cache.", rich_help_panel=ENGINE)
    ] = "auto"
    device: Annotated[str, Option(metavar="auto|cpu|cuda", help="Where the model runs.", rich_help_panel=ENGINE)] = (
        "auto"
    )
    attention_backend: Annotated[
        str, Option(metavar="torch|reference", help="The fast one, or the obviously right one.", rich_help_panel=ENGINE)
    ] = "torch"
    trace: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Write every decision of the engine as JSON lines; see the trace command.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    # Declared for --help: `minivllm.cli.main` has taken it out of the arguments, before the engine was imported.
    answers: Annotated[
        list[Path] | None,
        Option(
            "--with",
            metavar="PATH",
            help="Run your answer to an exercise (a file, or a folder of them) inside the engine; may be repeated.",
            rich_help_panel=ENGINE,
        ),
    ] = None

    def config(self, **changes: Any) -> EngineConfig:
        """The engine's configuration; raises `ConfigError` for values it can't run with."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in ENGINE_FIELDS}
        size = self.kv_cache_memory
        values["kv_cache_memory"] = None if size is None else parse_size("kv_cache_memory", size)
        return EngineConfig(
            **values
            | {
                "enable_prefix_caching": self.prefix_caching,
                "enable_chunked_prefill": self.chunked_prefill,
                "trace_file": self.trace,
            }
            | changes
        )


ENGINE_FIELDS = {f.name for f in dataclasses.fields(EngineConfig)}


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """The settings of `SamplingParams` that can be given on the command line. None: not given, so the command decides."""

    max_tokens: Annotated[int, Option(help="Most tokens to generate.", rich_help_panel=SAMPLING)] = 512
    temperature: Annotated[
        float | None,
        Option(
            help="0 takes the most likely token; higher is more varied.",
            show_default="0; in a chat 0.2",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            help="Draw from the likeliest tokens that together have this probability.",
            show_default="1; in a chat 0.9",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int, Option(help="Draw from this many of the likeliest tokens; 0: all.", rich_help_panel=SAMPLING)
    ] = 0
    min_p: Annotated[
        float, Option(help="Leave out tokens less likely than this share of the likeliest.", rich_help_panel=SAMPLING)
    ] = 0.0
    seed: Annotated[int | None, Option(help="Makes draws repeatable.", rich_help_panel=SAMPLING)] = None
    stop: Annotated[
        list[str] | None,
        Option(metavar="TEXT", help="Stop before this text; may be repeated.", rich_help_panel=SAMPLING),
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

    @functools.wraps(command)
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

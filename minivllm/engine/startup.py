"""From a model's name to a running engine: find, load, profile, size the KV cache, wire the parts.

Every phase is timed and leaves a line in the log, so that a start-up that fails, or takes long, tells where.

Source: vLLM 0.32 `v1/engine/core.py:EngineCore._initialize_kv_caches` and, in the processes that have the model,
`v1/worker/gpu_worker.py:Worker.init_device`, `load_model`, `determine_available_memory`; same order. Left out: its last
phase, `compile_or_warm_up_model`, which compiles, runs made-up steps and captures CUDA graphs. Here the runner captures
them when it is made, and nothing else is warmed up (book/decisions/0006-the-second-half.md).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.engine.core import EngineCore, Runner, Speculation
from minivllm.engine.draft_model import DraftSpeculation
from minivllm.engine.grammars import Grammars
from minivllm.engine.outputs import OutputProcessor
from minivllm.engine.procs import LeadRunner, Team, agree_on_free_memory, form_team, load_shard, under_torchrun
from minivllm.kv.hybrid import ONE_GROUP, form_groups
from minivllm.models.decoder import Decoder, resolve_device
from minivllm.models.fetch import resolve_model
from minivllm.models.loader import load_config, load_weights, open_checkpoint
from minivllm.models.shards import make_shard
from minivllm.models.tokenizer import Tokenizer
from minivllm.runner.attention import Backend
from minivllm.runner.device_memory import DeviceMemory, asked_share, check_free, held_bytes, profile_step, read_memory
from minivllm.runner.host import return_freed_memory
from minivllm.runner.kv_memory import KVMemory, plan_kv_memory
from minivllm.runner.model_runner import ModelRunner, pick_dtype
from minivllm.sample.beam_sampler import BeamSampler
from minivllm.sample.grammar.vocabulary import build_vocabulary
from minivllm.sample.logprobs import prompt_logprobs
from minivllm.sample.sampler import Sampler
from minivllm.sample.spec import NgramSpeculation
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import Recorder, TraceHeader

log = logging.getLogger(__name__)


class Phase(NamedTuple):
    """A part of start-up: the seconds it took, and by how many bytes the memory held has grown since it began."""

    name: str
    seconds: float
    grown_bytes: int


class Phases(list[Phase]):
    """The phases of a start-up in order. `with phases("load weights"):` adds one, also when it fails."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began, held = self._clock(), held_bytes(self._device)
        try:
            yield
        finally:
            self.append(Phase(name, self._clock() - began, held_bytes(self._device) - held))
            log.info("start-up: %s took %.3f s and %+.1f MiB", name, self[-1].seconds, self[-1].grown_bytes / 2**20)

    def __str__(self) -> str:
        """One line, without the phases that took no time to speak of."""
        parts = ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in self if phase.seconds >= 0.01)
        return f"Started in {sum(phase.seconds for phase in self):.1f} s: {parts}."


@dataclass(slots=True)
class Engine:
    """A running engine and what it runs: everything `LLM` needs."""

    core: EngineCore
    tokenizer: Tokenizer
    sampler: Sampler
    model_config: ModelConfig
    config: EngineConfig
    kv_memory: KVMemory
    phases: Phases
    backend: Backend


def start_engine(model: str | Path | None, config: EngineConfig, memory: DeviceMemory | None = None) -> Engine:
    """Load a model (None: the default one, fetched on first use) and build an engine around it.

    `memory` simulates a device: what it leaves unmeasured is measured. Raises `ModelError` if the model can't be found or
    read, and `ConfigError` if the configuration can't run it: the memory that it asks for isn't free, weights and a step
    leave nothing for KV, or one request of full length doesn't fit in what they leave.
    """
    return_freed_memory()  # else what an engine before this one has freed would hide what loading takes
    device = resolve_device(config.device)
    phases = Phases(device)
    config = under_torchrun(config)
    if config.tensor_parallel_size > 1:
        return start_parallel(model, config, phases)
    memory = memory or read_memory(device)
    check_free(memory, config)
    decoder, tokenizer = _load(model, config, phases)
    draft = load_draft(config, tokenizer, phases)
    if memory.loaded_bytes is None:
        memory = replace(memory, loaded_bytes=sum(phase.grown_bytes for phase in phases))
    return build_engine(decoder, tokenizer, config, memory, phases, draft)


def _load(model: str | Path | None, config: EngineConfig, phases: Phases) -> tuple[Decoder, Tokenizer]:
    with phases("resolve model"):
        path = resolve_model(None if model is None else os.fspath(model))
    with phases("config and tokenizer"):
        checkpoint = open_checkpoint(path)
        model_config, tokenizer = load_config(checkpoint), checkpoint.tokenizer()
    dtype = pick_dtype(config)
    with phases("load weights"):
        weights = load_weights(checkpoint, model_config, dtype)
    with phases("pack"):
        decoder = Decoder(model_config, weights, dtype=dtype, device=config.device)
        weights.clear()
        return_freed_memory()
    return decoder, tokenizer


def start_parallel(model: str | Path | None, config: EngineConfig, phases: Phases) -> Engine:
    """Start the other ranks of tensor parallelism, load this one's shard and build an engine around it.

    Raises what `start_engine` does, and `LostRankError` if a rank ends; none is left behind then.
    """
    if (share := asked_share(config)) is not None:
        raise ConfigError("memory_utilization", share, "is measured for one process only; give kv_cache_memory instead")
    if config.spec_method == "draft":
        raise ConfigError("spec_method", "draft", "its model runs in one process only; use ngram")
    size, gpus = config.tensor_parallel_size, torch.cuda.device_count()
    if dist.is_initialized():
        raise ConfigError("tensor_parallel_size", size, "one engine a process can have more than 1: end the other")
    if resolve_device(config.device).type == "cuda" and gpus < size:
        raise ConfigError("tensor_parallel_size", size, f"needs a GPU each: set it to at most {gpus}, or device to cpu")
    with phases("resolve model"):
        path = resolve_model(None if model is None else os.fspath(model))
    make_shard(load_config(open_checkpoint(path)), 0, size)  # refused before anything starts
    team = Team()
    try:
        with phases("processes"):
            form_team(team, path, config)
        with phases("load weights"):
            loaded, decoder = load_shard(team.group, path, config)
        planned = plan_kv_memory(config, decoder.config, decoder.dtype, agree_on_free_memory(team.group))
        with phases("KV cache"):
            runner = LeadRunner(team, decoder, config, planned.num_blocks)
        return _wire(runner, loaded.tokenizer, config, planned, phases)
    except BaseException as error:
        raise team.end(error) or error from None


def build_engine(
    decoder: Decoder,
    tokenizer: Tokenizer,
    config: EngineConfig,
    memory: DeviceMemory | None = None,
    phases: Phases | None = None,
    draft: Decoder | None = None,
) -> Engine:
    """An engine around a decoder that is in memory already (tests and lessons: a tiny one with random weights).

    `memory` is the device as it was before the decoder was loaded and what that took (None: as it is now); `phases` are
    those so far; `draft` is the model that proposes tokens, if one does.
    """
    phases = Phases(decoder.device) if phases is None else phases
    memory = memory or read_memory(decoder.device)
    if asked_share(config) is not None and memory.activation_bytes is None:
        with phases("profile run"):
            memory = replace(memory, activation_bytes=profile_step(decoder, config))
    planned = plan_kv_memory(config, decoder.config, decoder.dtype, memory, draft.config if draft else None)
    with phases("KV cache"):
        runner = ModelRunner(decoder, config, planned.num_blocks)
    return _wire(runner, tokenizer, config, planned, phases, draft)


def load_draft(config: EngineConfig, tokenizer: Tokenizer, phases: Phases) -> Decoder | None:
    """The model that proposes tokens, if one is to. Raises `ConfigError` unless its tokens are those of `tokenizer`."""
    if config.draft_model is None:
        return None
    decoder, its_tokenizer = _load(config.draft_model, config, phases)
    ours, theirs = ([t.token_bytes(i) for i in range(t.vocab_size)] for t in (tokenizer, its_tokenizer))
    if ours != theirs:
        raise ConfigError(
            "draft_model", config.draft_model, "has other tokens than the model: they must share a tokenizer"
        )
    return decoder


def _wire(
    model_runner: ModelRunner | LeadRunner,
    tokenizer: Tokenizer,
    config: EngineConfig,
    memory: KVMemory,
    phases: Phases,
    draft: Decoder | None = None,
) -> Engine:
    model = model_runner.model.config
    recorder = Recorder()
    size = memory.num_blocks, memory.max_model_len
    scheduler = Scheduler(config, *size, tokenizer.eos_token_ids, recorder, memory.windows)
    if config.trace_file:
        header = TraceHeader(config, *size, tuple(sorted(scheduler.eos_token_ids)), memory.windows)
        recorder.write_to(config.trace_file, header)
    sampler = Sampler(scheduler.eos_token_ids, model.vocab_size, config.seed)
    vocabulary = tokenizer.token_bytes, model.vocab_size, tokenizer.special_ids, scheduler.eos_token_ids
    runner: Runner = model_runner
    speculation: Speculation | None = NgramSpeculation(config) if config.spec_method == "ngram" else None
    if config.spec_method == "draft":
        runner = speculation = make_draft(config, runner, draft, sampler, memory)
    core = EngineCore(
        scheduler,
        runner,
        BeamSampler(sampler),
        OutputProcessor(tokenizer.token_bytes, tokenizer.special_ids),
        Grammars(partial(build_vocabulary, *vocabulary), can_end=bool(scheduler.eos_token_ids)),
        prompt_logprobs=prompt_logprobs,
        speculation=speculation,
    )
    return Engine(core, tokenizer, sampler, model, config, memory, phases, model_runner.backend)


def make_draft(
    config: EngineConfig, target: Runner, draft: Decoder | None, sampler: Sampler, memory: KVMemory
) -> DraftSpeculation:
    """A draft model over the target's blocks. Raises `ConfigError` if the two can't share them, or can't understand each other."""
    if draft is None or draft.config.vocab_size != sampler.vocab_size:
        raise ConfigError("draft_model", config.draft_model, f"must have {sampler.vocab_size} tokens, as the model has")
    if (longest := draft.config.max_position) < memory.max_model_len:
        raise ConfigError("max_model_len", memory.max_model_len, f"set it to at most {longest}, where the draft ends")
    groups = form_groups(draft.config.windows, config.hybrid)
    if memory.windows != ONE_GROUP or [group.window for group in groups] != [None]:
        raise ConfigError(
            "spec_method", "draft", 'needs one block table for all layers: set hybrid="off", or use ngram'
        )
    return DraftSpeculation(target, ModelRunner(draft, config, memory.num_blocks), sampler, config.spec_tokens)

"""From a model's name to a running engine: find, load, size the KV cache, wire the parts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.engine.core import EngineCore, Runner, Speculation
from minivllm.engine.draft_model import DraftSpeculation
from minivllm.engine.grammars import Grammars
from minivllm.engine.outputs import OutputProcessor
from minivllm.kv.hybrid import ONE_GROUP, form_groups
from minivllm.models.decoder import Decoder
from minivllm.models.fetch import resolve_model
from minivllm.models.loader import load_model
from minivllm.models.tokenizer import Tokenizer
from minivllm.runner.kv_memory import KVMemory, plan_kv_memory
from minivllm.runner.model_runner import ModelRunner, pick_dtype
from minivllm.sample.beam_sampler import BeamSampler
from minivllm.sample.grammar.vocabulary import build_vocabulary
from minivllm.sample.logprobs import prompt_logprobs
from minivllm.sample.sampler import Sampler
from minivllm.sample.spec import NgramSpeculation
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import Recorder, TraceHeader


@dataclass(slots=True)
class Engine:
    """A running engine and what it runs: everything `LLM` needs."""

    core: EngineCore
    tokenizer: Tokenizer
    sampler: Sampler
    model_config: ModelConfig
    config: EngineConfig
    kv_memory: KVMemory
    max_model_len: int


def start_engine(model: str | Path | None, config: EngineConfig) -> Engine:
    """Load a model (None: the default one, fetched on first use) and build an engine around it.

    Raises `ModelError` if the model can't be found or read and `ConfigError` if the configuration can't run it.
    """
    path = resolve_model(None if model is None else os.fspath(model))
    dtype = pick_dtype(config)
    loaded = load_model(path, dtype)
    decoder = Decoder(loaded.config, loaded.weights, dtype=dtype, device=config.device)
    draft = load_draft(config, loaded.tokenizer, dtype) if config.draft_model is not None else None
    return build_engine(decoder, loaded.tokenizer, config, draft)


def load_draft(config: EngineConfig, tokenizer: Tokenizer, dtype: torch.dtype) -> Decoder:
    """The model that proposes tokens. Raises `ConfigError` unless its tokens are those of `tokenizer`."""
    loaded = load_model(resolve_model(config.draft_model), dtype)
    ours, theirs = ([t.token_bytes(i) for i in range(t.vocab_size)] for t in (tokenizer, loaded.tokenizer))
    if ours != theirs:
        raise ConfigError(
            "draft_model", config.draft_model, "has other tokens than the model: they must share a tokenizer"
        )
    return Decoder(loaded.config, loaded.weights, dtype=dtype, device=config.device)


def build_engine(decoder: Decoder, tokenizer: Tokenizer, config: EngineConfig, draft: Decoder | None = None) -> Engine:
    """An engine around a decoder that is in memory already (tests and lessons: a tiny one with random weights)."""
    model = decoder.config
    memory = plan_kv_memory(config, model, decoder.dtype, draft=draft.config if draft else None)
    recorder = Recorder()
    size = memory.num_blocks, memory.max_model_len
    scheduler = Scheduler(config, *size, tokenizer.eos_token_ids, recorder, memory.windows)
    if config.trace_file:
        header = TraceHeader(config, *size, tuple(sorted(scheduler.eos_token_ids)), memory.windows)
        recorder.write_to(config.trace_file, header)
    sampler = Sampler(scheduler.eos_token_ids, model.vocab_size, config.seed)
    vocabulary = tokenizer.token_bytes, model.vocab_size, tokenizer.special_ids, scheduler.eos_token_ids
    runner: Runner = ModelRunner(decoder, config, memory.num_blocks)
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
    return Engine(core, tokenizer, sampler, model, config, memory, memory.max_model_len)


def make_draft(
    config: EngineConfig, target: Runner, draft: Decoder | None, sampler: Sampler, memory: KVMemory
) -> DraftSpeculation:
    """A draft model over the target's blocks. Raises `ConfigError` if the two can't share them, or can't understand each other."""
    if draft is None or draft.config.vocab_size != sampler.vocab_size:
        found = None if draft is None else f"{draft.config.vocab_size} tokens"
        raise ConfigError("draft_model", found, f"must have the model's vocabulary of {sampler.vocab_size} tokens")
    if draft.config.max_position < memory.max_model_len:
        raise ConfigError(
            "max_model_len", memory.max_model_len, f"the draft model ends at {draft.config.max_position} positions"
        )
    groups = form_groups(draft.config.windows, config.hybrid)
    if memory.windows != ONE_GROUP or [group.window for group in groups] != [None]:
        raise ConfigError(
            "spec_method", "draft", 'needs one block table for all layers: set hybrid="off", or use ngram'
        )
    return DraftSpeculation(target, ModelRunner(draft, config, memory.num_blocks), sampler, config.spec_tokens)

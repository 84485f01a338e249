"""From a model's name to a running engine: find, load, size the KV cache, wire the parts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from minivllm.config import EngineConfig, ModelConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.grammars import Grammars
from minivllm.engine.outputs import OutputProcessor
from minivllm.engine.procs import LeadRunner, Team, agree_on_free_memory, form_team, load_shard, under_torchrun
from minivllm.models.decoder import Decoder
from minivllm.models.fetch import resolve_model
from minivllm.models.loader import load_config, load_model, open_checkpoint
from minivllm.models.shards import make_shard
from minivllm.models.tokenizer import Tokenizer
from minivllm.runner.kv_memory import KVMemory, plan_kv_memory
from minivllm.runner.model_runner import ModelRunner, pick_dtype
from minivllm.sample.beam_sampler import BeamSampler
from minivllm.sample.grammar.vocabulary import build_vocabulary
from minivllm.sample.logprobs import prompt_logprobs
from minivllm.sample.sampler import Sampler
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
    config = under_torchrun(config)
    if config.tensor_parallel_size > 1:
        return start_parallel(path, config)
    dtype = pick_dtype(config)
    loaded = load_model(path, dtype)
    decoder = Decoder(loaded.config, loaded.weights, dtype=dtype, device=config.device)
    return build_engine(decoder, loaded.tokenizer, config)


def start_parallel(path: Path, config: EngineConfig) -> Engine:
    """Start the other ranks of tensor parallelism, load this one's shard and build an engine around it.

    Raises what `start_engine` does, and `LostRankError` if a rank ends; none is left behind then.
    """
    make_shard(load_config(open_checkpoint(path)), 0, config.tensor_parallel_size)  # before anything starts
    team = form_team(path, config)
    try:
        loaded, decoder = load_shard(team.group, path, config)
        return build_engine(decoder, loaded.tokenizer, config, team)
    except BaseException as error:
        raise team.end(error) or error from None


def build_engine(decoder: Decoder, tokenizer: Tokenizer, config: EngineConfig, team: Team | None = None) -> Engine:
    """An engine around a decoder that is in memory already (tests and lessons: a tiny one with random weights); with a
    team, around rank 0's shard of one."""
    model = decoder.config
    free_bytes = None if team is None else agree_on_free_memory(team.group, config)
    memory = plan_kv_memory(config, model, decoder.dtype, free_bytes=free_bytes)
    recorder = Recorder()
    size = memory.num_blocks, memory.max_model_len
    scheduler = Scheduler(config, *size, tokenizer.eos_token_ids, recorder, memory.windows)
    if config.trace_file:
        header = TraceHeader(config, *size, tuple(sorted(scheduler.eos_token_ids)), memory.windows)
        recorder.write_to(config.trace_file, header)
    sampler = Sampler(scheduler.eos_token_ids, model.vocab_size, config.seed)
    runner = (ModelRunner if team is None else partial(LeadRunner, team))(decoder, config, memory.num_blocks)
    vocabulary = tokenizer.token_bytes, model.vocab_size, tokenizer.special_ids, scheduler.eos_token_ids
    core = EngineCore(
        scheduler,
        runner,
        BeamSampler(sampler),
        OutputProcessor(tokenizer.token_bytes, tokenizer.special_ids),
        Grammars(partial(build_vocabulary, *vocabulary), can_end=bool(scheduler.eos_token_ids)),
        prompt_logprobs=prompt_logprobs,
    )
    return Engine(core, tokenizer, sampler, model, config, memory, memory.max_model_len)

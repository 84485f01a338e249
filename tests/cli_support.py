"""Shared by the tests of the command line: scheduler runs without a model, and a tiny model on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minivllm.cli.cache_view import State, state_of
from minivllm.config import EngineConfig
from minivllm.plan import TraceEvent
from minivllm.request import Request, SampledToken, SamplingParams
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import Recorder, TraceHeader

TINY = EngineConfig(block_size=4, max_num_batched_tokens=8)
Wish = tuple[int, list[int], int, int]  # arrives after this step, prompt, n, new tokens


@dataclass
class SchedulerRun:
    """What a scheduler did with some requests, with made-up tokens instead of a model's."""

    scheduler: Scheduler
    events: list[TraceEvent]
    states: dict[int, State]


def run_requests(
    config: EngineConfig, num_blocks: int, wishes: list[Wish], *, steps: int = 1000, trace: Path | None = None
) -> SchedulerRun:
    """Schedule until all is done, or for `steps` steps; with `trace`, write a trace file too."""
    max_model_len = (num_blocks - 1) * config.block_size
    recorder = Recorder()
    scheduler = Scheduler(config, num_blocks, max_model_len, (), recorder)
    if trace is not None:
        recorder.write_to(trace, TraceHeader(config, num_blocks, max_model_len, ()))
    run = SchedulerRun(scheduler, [], {})
    todo = list(enumerate(wishes))
    while (todo or scheduler.has_requests) and recorder.step < steps:
        for number, (_, prompt, n, new) in [w for w in todo if w[1][0] <= recorder.step]:
            params = SamplingParams(n=n, max_tokens=new)
            scheduler.add(Request(f"r{number}", prompt, params, max_tokens=new))
        todo = [w for w in todo if w[1][0] > recorder.step]
        plan = scheduler.schedule()
        drawn = [[SampledToken(900 + recorder.step)] * len(row.samples) for row in plan.rows if row.samples]
        scheduler.update(plan, drawn)
        run.states[recorder.step] = state_of(scheduler)
    recorder.close()
    run.events = list(recorder.events)
    return run


CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def write_tiny_model(folder: Path, *, vocab_size: int = 260, **changes: object) -> Path:
    """A Llama with random weights and one token a byte, as a safetensors folder. `changes` go into its config.json."""
    config = TINY_CONFIG | {"vocab_size": vocab_size} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}))
    save_file(_random_weights(config), folder / "model.safetensors")
    return folder


def _random_weights(config: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator)}
    weights["model.norm.weight"] = torch.ones(hidden)
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape, generator=generator) * 0.3
    return weights

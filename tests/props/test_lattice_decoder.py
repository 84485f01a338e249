"""The lattice again, with real attention: a tiny decoder in float64, and SmolLM2 in float32 where gaps allow a verdict."""

from functools import cache

import pytest
import torch

from minivllm.config import ModelConfig
from minivllm.models.decoder import Decoder
from minivllm.request import SampledToken
from minivllm.runner.model_runner import ModelRunner
from minivllm.sample.spec import keep_matching
from tests.lattice import Cell, cells, make_scheduler, num_blocks, propose_nothing, prove, refused, run, workload
from tests.random_weights import random_weights
from tests.reference_decoder import reference_logits

EOS, VOCAB, LENGTH = 0, 50, 12
MODEL = ModelConfig(
    "llama", vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4,
    max_position=64,
)  # fmt: skip
GAP = 1e-6
CELLS = [c for c in cells() if c.max_model_len == LENGTH and c.policy == "fcfs" and not refused(c)]


def pick(logits, index):
    """The child's token: the first child takes the best, the second the second best, so that siblings differ."""
    values, ids = logits.topk(index + 2)
    assert values[index] - values[index + 1] > GAP, "a near tie: no verdict possible"
    return int(ids[index])


@cache
def weights_of(model: ModelConfig):
    return random_weights(model, std=0.5, dtype=torch.float64, seed=3)


@cache
def expected(model: ModelConfig = MODEL):
    """What the plain cache-free decoder says to the workload."""
    said = {}
    for request in workload(LENGTH, VOCAB, EOS):
        for sequence in request.sequences:
            tokens = list(request.prompt_token_ids)
            while len(tokens) < len(request.prompt_token_ids) + request.max_tokens:
                tokens.append(
                    pick(reference_logits(model, weights_of(model), torch.tensor(tokens))[-1], sequence.index)
                )
                if tokens[-1] == EOS and not request.params.ignore_eos:
                    break
            said[request.id, sequence.index] = tokens[len(request.prompt_token_ids) :]
    return said


def say(
    cell: Cell,
    model: ModelConfig = MODEL,
    spoil=lambda runner: None,
    prove=prove,
    propose=propose_nothing,
    dtype=torch.float64,
):
    requests = workload(LENGTH, VOCAB, EOS)
    scheduler = make_scheduler(cell, requests, EOS)
    weights = {name: weight.to(dtype) for name, weight in weights_of(model).items()}
    decoder = Decoder(model, weights, dtype=dtype, device="cpu")
    runner = ModelRunner(decoder, cell.config, num_blocks(cell, requests))
    spoil(runner)

    def execute(plan):
        if not plan.rows:
            return []
        rows = zip(plan.groups, runner.execute(plan).logits, strict=True)
        return keep_matching(plan, [[SampledToken(pick(logits, s.index)) for s in group] for group, logits in rows])

    said = run(cell, scheduler, requests, execute, propose=propose)
    prove(cell, requests, list(scheduler.recorder.events))
    return said


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_decoder_says_the_same_under_every_configuration(cell):
    assert say(cell) == expected()


def forget_copies(runner):
    runner.cache.copy_blocks = lambda pairs: None


def overwrite_a_slot(runner):
    """From the tenth write on, each write also spoils the row that the one before it began with."""
    cache, write, written = runner.cache, runner.cache.write, []

    def wrong(layer, rows, k, v):
        write(layer, rows, k, v)
        if len(written) > 9:
            cache.layers[layer].view(-1, cache.head_dim)[written[-1]] += 1
        written.append(int(rows[0]))

    runner.cache.write = wrong


def swap_values(runner):
    write = runner.cache.write
    runner.cache.write = lambda layer, rows, k, v: write(layer, rows, k, v.roll(1, 1))


@pytest.mark.parametrize("fault", [forget_copies, overwrite_a_slot, swap_values])
def test_a_seeded_kv_fault_changes_what_is_said(fault):
    cell = Cell(LENGTH, 4, 7, caching=True, tight=True, mixed=True, chunked=True, policy="fcfs")
    try:
        said = say(cell, spoil=fault)
    except AssertionError as verdict:
        said = str(verdict)
    assert said != expected()

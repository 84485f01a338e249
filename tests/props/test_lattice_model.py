"""The lattice on SmolLM2 in float32: logits within a tolerance of a cache-free decoder, tokens equal where the gap allows."""

from functools import cache

import pytest
import torch

from minivllm.config import EngineConfig
from minivllm.engine.startup import build_engine
from minivllm.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.models.fetch import resolve_model
from minivllm.models.loader import load_model
from minivllm.plan import EventKind
from minivllm.request import SamplingParams
from tests.reference_decoder import reference_logits

pytestmark = pytest.mark.model

TOLERANCE = 2e-3
"""Largest difference of a logit (they span about 40) that another order of float32 additions may cause."""

PREFIX = "You are a careful librarian. Answer in one short sentence.\n"
PROMPTS = [PREFIX + "Who wrote Hamlet?", PREFIX + "Where is the Nile?", "1, 2, 3, 4,", PREFIX + "Who wrote Hamlet?"]
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
CONFIGS = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 5},
    "small-blocks": {"block_size": 4, "max_num_batched_tokens": 16},
    "no-cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 9},
    "tight": {"block_size": 4, "num_kv_blocks": 16, "max_model_len": 48, "max_num_batched_tokens": 16},
    "torch": {"attention_backend": "torch"},
    "reference": {"attention_backend": "reference"},
}


@cache
def model():
    loaded = load_model(resolve_model(None), torch.float32)
    return loaded, Decoder(loaded.config, loaded.weights, dtype=torch.float32, device="cpu")


@cache
def expected_logits(tokens):
    return reference_logits(model()[0].config, model()[0].weights, torch.tensor(tokens))


def run(config):
    """Outputs of the prompts, and the logits behind each drawn token: (request, position) -> [V]."""
    loaded, decoder = model()
    settings = EngineConfig(**({"num_kv_blocks": 200, "max_model_len": 256, "dtype": "float32"} | config))
    llm = LLM(engine=build_engine(decoder, loaded.tokenizer, settings))
    seen = {}
    runner = llm.engine.core.runner
    execute = runner.execute

    def listen(plan):
        result = execute(plan)
        rows = [row for row in plan.rows if row.samples]
        seen.update({(r.sequence.request.id, r.stop): x for r, x in zip(rows, result.logits, strict=True)})
        return result

    runner.execute = listen
    return llm.generate(PROMPTS, PARAMS), seen, {e.kind for e in llm.engine.core.scheduler.recorder.events}


@pytest.mark.parametrize("name", CONFIGS)
def test_smollm2_thinks_the_same_under_every_configuration(name):
    outputs, seen, kinds = run(CONFIGS[name])
    for output in outputs:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        expected = expected_logits(tokens[:-1])
        for position in range(len(output.prompt_token_ids), len(tokens)):
            logits, reference = seen[output.request_id, position], expected[position - 1]
            assert (logits - reference).abs().max() < TOLERANCE
            best, second = reference.topk(2).values
            if best - second > 10 * TOLERANCE:
                assert tokens[position] == int(reference.argmax())
    assert (EventKind.PREEMPTED in kinds) == (name == "tight")
    assert (EventKind.HIT in kinds) == (name != "no-cache")

"""Windows with real attention: a tiny decoder in float64 says what a cache-free one with masked attention says."""

from dataclasses import replace
from itertools import product

import pytest

from minivllm.config import EngineConfig, ModelConfig
from minivllm.kv import hybrid
from minivllm.runner import model_runner
from tests.lattice import prove_batch, prove_cache, prove_forks
from tests.props.test_lattice_decoder import LENGTH, MODEL, expected, say
from tests.props.test_lattice_hybrid import HybridCell, prove_windows

MODELS = {
    "alternating": replace(MODEL, num_layers=4, sliding_window=5, layer_kinds=("sliding", "full") * 2),
    "uneven": replace(MODEL, num_layers=3, sliding_window=3, layer_kinds=("full", "sliding", "sliding")),
    "all sliding": replace(MODEL, sliding_window=4),
}
"""Two groups of two layers; a full group and two sliding ones; a single group, which slides."""


class DecoderCell(HybridCell):
    """A cell of a model with more layers, by the attention backend."""

    backend = "torch"

    @property
    def config(self) -> EngineConfig:
        return replace(HybridCell.config.fget(self), attention_backend=self.backend)


class ReferenceCell(DecoderCell):
    """The same with the backend that is obviously right."""

    backend = "reference"


def decoder_cells(model: ModelConfig, kind: type[DecoderCell] = DecoderCell) -> list[DecoderCell]:
    both = (True, False)
    return [
        kind(LENGTH, size, budget, caching, tight, True, True, "fcfs", model.windows, switch)
        for (size, budget), caching, tight, switch in product(((1, 64), (4, 7)), both, both, ("on", "off"))
    ]


def prove(cell, requests, events):
    prove_batch(cell, requests, events)
    prove_cache(cell, requests, events)
    prove_forks(cell, requests, events)
    prove_windows(cell, events)


CELLS = [pytest.param(m, c, id=f"{name}-{c}") for name, m in MODELS.items() for c in decoder_cells(m)]


@pytest.mark.parametrize(("model", "cell"), CELLS)
def test_a_decoder_with_windows_says_the_same_whatever_is_kept(model, cell):
    assert say(cell, model, prove=prove) == expected(model)


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_backend_says_so_too(name):
    for cell in decoder_cells(MODELS[name], ReferenceCell)[::5]:
        assert say(cell, MODELS[name], prove=prove) == expected(MODELS[name])


def test_windows_do_change_what_is_said():
    model = MODELS["alternating"]
    assert expected(replace(model, sliding_window=model.sliding_window + 1)) != expected(model)


def skip_one_token_more(num_computed, window, block_size):
    return max(num_computed - window + 2, 0) // block_size


def view_one_token_less(plan, block_size, device, group, window):
    return original_build(plan, block_size, device, group, window and window - 1)


def view_without_window(plan, block_size, device, group, window):
    return original_build(plan, block_size, device, group, None)


original_build = model_runner.build_input_batch


@pytest.mark.parametrize(
    ("owner", "function", "fault"),
    [
        (hybrid, "num_skipped", skip_one_token_more),
        (model_runner, "build_input_batch", view_one_token_less),
        (model_runner, "build_input_batch", view_without_window),
    ],
)
def test_a_seeded_fault_changes_what_is_said(owner, function, fault, monkeypatch):
    monkeypatch.setattr(owner, function, fault)
    model = MODELS["alternating"]
    cell = next(c for c in decoder_cells(model) if c.tight and c.caching and c.block_size == 1 and c.hybrid == "on")
    try:
        said = say(cell, model, prove=prove)
    except AssertionError as verdict:
        said = str(verdict)
    assert said != expected(model)

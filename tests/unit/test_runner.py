"""From a plan to logits: what the runner promises, on a tiny model in float64."""

import pytest
import torch

from minivllm.config import EngineConfig, ModelConfig
from minivllm.models.decoder import Decoder
from minivllm.plan import Row, StepPlan
from minivllm.request import Request, SamplingParams
from minivllm.runner.input_batch import build_input_batch
from minivllm.runner.kv_cache import KVCache
from minivllm.runner.model_runner import ModelRunner, pick_dtype
from tests.random_weights import random_weights
from tests.reference_decoder import reference_logits

CONFIG = ModelConfig("qwen3", 61, 24, 40, 2, 6, 2, 8)
WEIGHTS = random_weights(CONFIG, dtype=torch.float64)
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


def make_runner() -> ModelRunner:
    model = Decoder(CONFIG, WEIGHTS, dtype=torch.float64)
    return ModelRunner(model, EngineConfig(block_size=4), num_blocks=16)


def make_row(token_ids: list[int], start: int, stop: int, block_ids: list[int], **params: int) -> Row:
    """Tokens start .. stop - 1 of a sequence; it's sampled where they reach its end."""
    request = Request("r", token_ids, SamplingParams(**params), max_tokens=8)
    sampled = tuple(request.sequences) if stop == len(token_ids) else ()
    return Row(request.sequences[0], start, stop - start, block_ids, sampled)


def run(runner: ModelRunner, *rows: Row) -> torch.Tensor:
    return runner.execute(StepPlan(0, list(rows))).logits


def expected(token_ids: list[int]) -> torch.Tensor:
    return reference_logits(CONFIG, WEIGHTS, token_ids)[-1:]


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cuts", [[10], [1, 9], [4, 3, 3], [3, 1, 1, 1, 4]])
def test_chunks_add_up_to_the_whole_prompt(cuts):
    runner, start = make_runner(), 0
    for cut in cuts:
        logits = run(runner, make_row(PROMPT, start, start + cut, [7, 2, 5]))
        start += cut
    assert_same(logits, expected(PROMPT))


def test_only_sampled_rows_have_logits_in_plan_order():
    rows = [
        make_row(PROMPT, 0, 10, [1, 2, 3]),
        make_row(PROMPT, 0, 4, [4]),
        make_row(PROMPT[:1], 0, 1, [5]),
    ]
    assert_same(run(make_runner(), *rows), torch.cat([expected(PROMPT), expected(PROMPT[:1])]))


def test_a_row_with_many_samples_has_one_row_of_logits():
    assert run(make_runner(), make_row(PROMPT, 0, 10, [1, 2, 3], n=3)).shape == (1, CONFIG.vocab_size)


def test_a_step_with_nothing_to_sample_has_empty_logits():
    assert run(make_runner(), make_row(PROMPT, 0, 4, [1])).shape == (0, CONFIG.vocab_size)


def test_a_row_may_attend_to_blocks_that_a_later_row_of_the_step_fills():
    other = [*PROMPT[:8], 40]
    rows = make_row(other, 8, 9, [1, 2, 4]), make_row(PROMPT, 0, 10, [1, 2, 3])
    assert_same(run(make_runner(), *rows), torch.cat([expected(other), expected(PROMPT)]))


def test_a_copied_block_keeps_what_its_source_held():
    runner = make_runner()
    run(runner, make_row(PROMPT[:7], 0, 6, [1, 2]))
    row = make_row(PROMPT[:7], 6, 7, [1, 3])
    row.copies = ((2, 3),)
    assert_same(run(runner, row), expected(PROMPT[:7]))


def test_block_copies_read_every_source_before_writing():
    cache = KVCache(CONFIG, 3, 4, torch.float64)
    for layer in cache.layers:
        layer.copy_(torch.arange(3).repeat_interleave(4)[:, None].expand(12, 8))
    cache.copy_blocks([(1, 2), (2, 1)])
    assert all(layer[0, ::4, 0].tolist() == [0, 2, 1] for layer in cache.layers)


def test_prompt_logits_cover_each_position_of_rows_that_ask():
    rows = [make_row(PROMPT, 0, 3, [1]), make_row(PROMPT, 0, 6, [2, 3], prompt_logprobs=1)]
    result = make_runner().execute(StepPlan(0, rows))
    assert list(result.prompt_logits) == [1]
    assert_same(result.prompt_logits[1], reference_logits(CONFIG, WEIGHTS, PROMPT[:6]))


def test_generated_tokens_ask_for_no_prompt_logits():
    row = make_row(PROMPT, 0, 10, [1, 2, 3], prompt_logprobs=1)
    row.sequence.output_token_ids.append(5)
    batch = build_input_batch(StepPlan(0, [Row(row.sequence, 10, 1, [1, 2, 3])]), 4)
    assert batch.prompt_rows == ()
    assert batch.token_ids.tolist() == [5]


def test_input_batch_lays_rows_end_to_end():
    batch = build_input_batch(StepPlan(0, [make_row(PROMPT, 3, 6, [9, 4]), make_row(PROMPT, 9, 10, [1, 2, 3])]), 4)
    assert batch.token_ids.tolist() == [9, 26, 5, 7]
    assert batch.positions.tolist() == [3, 4, 5, 9]
    assert batch.slot_mapping.tolist() == [39, 16, 17, 13]
    assert batch.block_tables.tolist() == [[9, 4, 0], [1, 2, 3]]
    assert (batch.query_starts, batch.starts, batch.context_lengths) == ((0, 3, 4), (3, 9), (6, 10))
    assert batch.logits_indices.tolist() == [3]


def test_padding_repeats_a_rows_first_block_and_knows_what_is_unwritten():
    batch = build_input_batch(StepPlan(0, [make_row(PROMPT, 0, 3, [9]), make_row(PROMPT, 0, 6, [8, 4])]), 4)
    assert batch.blocks([0, 1], 3).tolist() == [[9, 9, 9], [8, 4, 8]]
    assert batch.unwritten([0, 1], 3).int().tolist() == [[0, 0, 0, 1] * 3, [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]]


def test_dtype_comes_from_the_configuration():
    assert pick_dtype(EngineConfig(dtype="float64")) == torch.float64
    assert pick_dtype(EngineConfig()) in (torch.bfloat16, torch.float32)

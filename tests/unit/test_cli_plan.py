"""`plan` and its arithmetic: the numbers of rows A17, A25, A28 and A33."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from minivllm.calc.budget import Budget, find_device, find_shape
from minivllm.calc.hw import GIB, H100, L4
from minivllm.calc.models import GPT_OSS_20B, LLAMA_3_8B, LLAMA_3_70B, SMOLLM2_135M
from minivllm.cli.app import app

ASKED = ("plan", "--model", "llama-3-70b", "--gpu", "h100", "--tp", "2")


def run_cli(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def in_gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 2)


def test_row_A25_llama_70b_on_two_h100():
    budget = Budget(LLAMA_3_70B, H100, 131_072, tp=2)
    parts = budget.requested_bytes, budget.weight_bytes, budget.kv_budget, budget.needed_bytes
    assert [in_gib(part) for part in parts] == [72.85, 65.71, 4.14, 20.0]
    assert budget.num_blocks * budget.block_size == 27_104
    assert budget.longest == 27_104 - 16  # one block is the null block
    assert not budget.fits


def test_row_A25_what_helps():
    fp8_kv = Budget(LLAMA_3_70B, H100, 131_072, tp=2, kv_bits=8)
    assert (in_gib(fp8_kv.needed_bytes), fp8_kv.fits) == (10.0, False)
    fp8_weights = Budget(LLAMA_3_70B, H100, 131_072, tp=2, weight_bits=8)
    assert (in_gib(fp8_weights.kv_budget), fp8_weights.fits) == (36.99, True)
    shorter = Budget(LLAMA_3_70B, H100, 16_384, tp=2)
    assert (shorter.fits, round(shorter.concurrency, 2)) == (True, 1.65)
    assert Budget(LLAMA_3_70B, H100, 131_072, tp=4).fits


@pytest.mark.parametrize(("share", "left"), [(0.9, 2.55), (0.95, 6.51)])
def test_row_A17_points_of_utilisation_buy_few_gib(share, left):
    assert in_gib(Budget(LLAMA_3_70B, H100, 131_072, tp=2, memory_utilization=share).kv_budget) == pytest.approx(
        left, abs=0.01
    )


def test_row_A28_llama_8b_has_28102_blocks():
    budget = Budget(LLAMA_3_8B, H100)
    assert (budget.num_blocks, budget.num_blocks * 16) == (28_102, 449_632)


def test_the_command_prints_the_budget_and_refuses_what_would_not_start():
    result = run_cli(*ASKED, "--max-model-len", 131_072)
    assert result.exit_code == 1
    for figure in ("79.18 GiB", "72.85 GiB", "65.71 GiB", "4.14 GiB", "160 KiB", "1,694", "27,104", "20.00 GiB"):
        assert figure in result.stdout
    told = " ".join(result.stdout.split())
    assert "needs 15.87 GiB more" in told
    assert "at most 27,088" in told


def test_row_A33_a_model_with_windows_is_counted_as_it_is_kept_and_as_it_would_be_without_groups():
    budget = Budget(GPT_OSS_20B, H100, 131_072)
    assert budget.needed_bytes == (8192 + 521) * budget.block_bytes
    assert (in_gib(budget.needed_bytes), in_gib(budget.one_table_bytes)) == (3.19, 6.0)
    result = run_cli("plan", "--model", "gpt-oss-20b", "--gpu", "h100", "--max-model-len", 131_072)
    told = " ".join(result.stdout.split())
    assert "one request 3.19 GiB 131,072 tokens; 12 of 24 layers keep 128 and a step of 8,192" in told
    assert "- all kept 6.00 GiB if they kept everything" in told
    assert "of 16 tokens in 12 layers" in told


def test_without_windows_there_is_no_such_line():
    assert "all kept" not in run_cli(*ASKED).stdout


def test_a_model_whose_every_layer_has_a_window_has_no_longest_request():
    with pytest.raises(ValueError, match="shape='gpt-oss-20b': must have a layer that attends to everything"):
        Budget(replace(GPT_OSS_20B, window_pattern=(128,)), H100)


def test_auto_starts_with_the_longest_that_fits():
    result = run_cli(*ASKED)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "Starts, with max_model_len=27,088.")


def test_auto_ends_where_the_model_does():
    budget = Budget(SMOLLM2_135M, L4)
    assert (budget.length, budget.longest > 800_000) == (8192, True)
    result = run_cli("plan", "--model", "smollm2-135m", "--gpu", "l4")
    told = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert "one request 0.18 GiB 8,192 tokens" in told
    assert "tokens that memory lets one request have; the model was made for 8,192" in told
    assert told.endswith("Starts, with max_model_len=8,192.")


def test_more_positions_than_the_model_was_made_for_do_not_start():
    result = run_cli("plan", "--model", "smollm2-135m", "--gpu", "l4", "--max-model-len", 8193)
    told = " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert told.endswith("max_model_len=8,193, but the model was made for at most 8,192 positions.")


def test_a_model_that_leaves_nothing_is_told_so():
    result = run_cli("plan", "--model", "llama-3-70b", "--gpu", "h100")
    assert result.exit_code == 1
    assert "nothing is left for KV" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "llama-9"), "model='llama-9': must be one of SmolLM2-135M"),
        (("--model", "qwen3"), "model='qwen3': must be one of"),
        (("--gpu", "tpu"), "gpu='tpu': must be one of H100 SXM"),
        (("--tp", 3), "tp=3: must divide 8 KV heads"),
        (("--kv-bits", 4), "kv_bits=4: must be 8 or 16"),
        (("--max-model-len", "long"), "max_model_len='long': must be a number of tokens, or auto"),
        (("--memory-utilization", 1.5), "memory_utilization=1.5: must be in (0, 1]"),
    ],
)
def test_bad_input_is_named(flags, message):
    result = run_cli(*ASKED, *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_names_are_found_without_case_and_by_a_beginning_that_is_only_ones():
    assert find_shape("LLAMA-3-8b") is LLAMA_3_8B
    assert find_device("h100") is H100
    assert find_device("l4") is L4
    with pytest.raises(ValueError, match="gpu='': must be one of"):
        find_device("")

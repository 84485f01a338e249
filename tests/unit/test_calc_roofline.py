"""Speed bounds: the numbers of row A22, units that can't be mixed up, and the errors that name field and value."""

import pytest

from minivllm.calc import roofline
from minivllm.calc.hw import A100, B200, DESKTOP_DDR5, DEVICES, GB, GIB, H100, H200, L4, M4_MAX, RTX_4090
from minivllm.calc.models import GPT_OSS_20B, LLAMA_3_8B, LLAMA_3_70B, Q4_K_M_BYTES

LLAMA_8B_Q4 = Q4_K_M_BYTES["Llama-3-8B"]
LLAMA_70B_Q4 = Q4_K_M_BYTES["Llama-3-70B"]


def within_1_percent(value):
    return pytest.approx(value, rel=0.01)


def test_row_A22_a_laptop_decodes_an_8b_in_4_bits_at_111_tokens_a_second():
    assert roofline.decode_tps(M4_MAX.bandwidth_bytes_per_s, LLAMA_8B_Q4) == within_1_percent(111.0)


def test_row_A22_a_gaming_gpu_decodes_the_same_file_at_205():
    assert roofline.decode_tps(RTX_4090.bandwidth_bytes_per_s, LLAMA_8B_Q4) == within_1_percent(204.9)


def test_row_A22_one_user_gets_209_from_an_h100_in_bfloat16_and_417_in_fp8():
    parameters = LLAMA_3_8B.parameters
    assert roofline.decode_tps(H100.bandwidth_bytes_per_s, 2 * parameters) == within_1_percent(208.6)
    assert roofline.decode_tps(H100.bandwidth_bytes_per_s, parameters) == within_1_percent(417.2)


def test_row_A22_a_70b_in_4_bits_runs_at_12_8_where_it_fits():
    assert roofline.decode_tps(M4_MAX.bandwidth_bytes_per_s, LLAMA_70B_Q4) == within_1_percent(12.8)


def test_row_A22_and_at_3_6_where_half_of_it_spills_to_desktop_memory():
    tps = roofline.spill_tps(LLAMA_70B_Q4, 22 * GB, RTX_4090.bandwidth_bytes_per_s, DESKTOP_DDR5.bandwidth_bytes_per_s)
    assert tps == within_1_percent(3.59)


def test_row_A22_a_batch_of_256_takes_an_h100_to_34000_tokens_a_second():
    step = roofline.decode_step(
        LLAMA_3_8B, H100, 256, 1024, weight_bytes=LLAMA_3_8B.parameters, kv_element_bytes=1, precision="fp8"
    )
    assert step.tokens_per_s == within_1_percent(34_018)
    assert step.limited_by == "memory"


def test_row_A22_prefill_is_the_laptops_weakness():
    flops = roofline.linear_flops(LLAMA_3_8B, 2000)
    assert flops / (0.5 * M4_MAX.bf16) == within_1_percent(1.89)
    assert flops / (0.5 * H100.bf16) == within_1_percent(0.0649)
    assert roofline.prefill_seconds(LLAMA_3_8B, M4_MAX, 2000) == pytest.approx(1.95, rel=0.01)


def test_row_A22_a_sparse_mixture_reads_only_its_active_experts():
    embedding = GPT_OSS_20B.vocab_size * GPT_OSS_20B.hidden_size
    bytes_per_token = (GPT_OSS_20B.active_parameters - embedding) * 4.25 / 8
    assert bytes_per_token == within_1_percent(1.91e9)
    assert roofline.decode_tps(M4_MAX.bandwidth_bytes_per_s, bytes_per_token) == within_1_percent(286)


@pytest.mark.parametrize(
    ("device", "ridge"), [(H100, 295.3), (H200, 206), (B200, 281), (A100, 153), (L4, 403), (RTX_4090, 164)]
)
def test_the_ridge_is_peak_over_bandwidth(device, ridge):
    assert roofline.ridge_flops_per_byte(device) == pytest.approx(ridge, rel=0.005)


def test_fp8_moves_the_ridge_as_it_doubles_the_peak():
    assert roofline.ridge_flops_per_byte(H100, "fp8") == pytest.approx(2 * 295.3, rel=0.001)


def test_spilling_nothing_is_the_gpu_and_spilling_everything_is_the_host():
    assert roofline.spill_tps(10, 10, 5, 1) == 0.5
    assert roofline.spill_tps(10, 99, 5, 1) == 0.5
    assert roofline.spill_tps(10, 0, 5, 1) == 0.1


def test_spilled_times_add_and_bandwidths_are_not_averaged():
    assert roofline.spill_tps(10, 5, gpu_bw=5, host_bw=1) == pytest.approx(1 / (5 / 5 + 5 / 1))


def test_a_mixture_that_spills_reads_its_active_bytes_from_both_memories_in_proportion():
    assert roofline.spill_tps(100, 50, 10, 1, active_bytes=20) == pytest.approx(1 / (10 / 10 + 10 / 1))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1, 1, 1), "model_bytes=0"),
        ((1, -1, 1, 1), "gpu_bytes=-1"),
        ((1, 1, 0, 1), "gpu_bw=0"),
        ((1, 1, 1, -2), "host_bw=-2"),
        ((1, 1, 1, 1, 0), "active_bytes=0"),
        ((1, 1, 1, 1, 2), "active_bytes=2"),
    ],
)
def test_spill_refuses_what_makes_no_sense_and_names_it(arguments, named):
    with pytest.raises(ValueError, match=named):
        roofline.spill_tps(*arguments)


def test_a_precision_without_a_unit_is_refused():
    with pytest.raises(ValueError, match="fp8"):
        A100.peak("fp8")


def test_a_chunk_after_a_long_context_costs_more_attention_than_the_first():
    first = roofline.prefill_seconds(LLAMA_3_8B, H100, 1000)
    later = roofline.prefill_seconds(LLAMA_3_8B, H100, 1000, context=100_000)
    assert later > 2 * first


def test_weights_of_a_70b_are_141_gb_but_131_gib():
    assert 2 * LLAMA_3_70B.parameters / GB == pytest.approx(141.11, abs=0.01)
    assert 2 * LLAMA_3_70B.parameters / GIB == pytest.approx(131.42, abs=0.01)


def test_every_device_says_where_its_values_are_from():
    assert all(device.source for device in DEVICES)
    assert {"bf16"} <= set(M4_MAX.estimated)

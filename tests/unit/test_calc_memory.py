"""KV memory: the numbers of rows A15, A18, A28, A29, A33, A35 and B1."""

from dataclasses import replace

import pytest

from minivllm.calc import memory
from minivllm.calc.hw import GIB, MIB
from minivllm.calc.models import GPT_OSS_20B, GPT_OSS_120B, LLAMA_3_8B, LLAMA_3_70B

KV_BLOCK = 2 * MIB  # Llama-3-8B, 16 tokens


@pytest.mark.parametrize(
    ("block_size", "percent"), [(1, 0), (8, 0.7), (16, 1.4), (32, 2.9), (64, 5.8), (128, 11.0), (256, 19.9)]
)
def test_row_A29_expected_waste_at_512_tokens(block_size, percent):
    assert round(100 * memory.expected_waste_share(512, block_size), 1) == percent


def test_row_A29_a_trace_of_mean_342_uses_16_7_percent_when_reserved_and_97_9_when_paged():
    lens = memory.lognormal_lengths()
    assert len(lens) == 1000
    assert sum(lens) / 1000 == pytest.approx(342, abs=0.5)
    assert round(100 * memory.reserved_use(lens, 2048), 1) == 16.7
    assert round(100 * memory.paged_use(lens, 16), 1) == 97.9


def test_row_B1_paging_holds_5_9_times_as_many_sequences():
    lens = memory.lognormal_lengths()
    reserved, paged = memory.reserved_use(lens, 2048), memory.paged_use(lens, 16)
    assert (round(reserved, 3), round(paged, 3)) == (0.167, 0.979)
    assert paged / reserved == pytest.approx(5.9, abs=0.05)


def test_row_A29_a_sequence_wastes_at_most_15_slots_which_are_1_875_mib():
    assert memory.paged_waste([1], 16) == 15
    assert 15 * LLAMA_3_8B.kv_bytes_per_token() / MIB == 1.875
    assert memory.paged_waste([1] * 256, 16) * LLAMA_3_8B.kv_bytes_per_token() / MIB == 480


@pytest.mark.parametrize(
    ("lens", "waste"), [([], 0), ([0], 0), ([16], 0), ([32, 16], 0), ([17], 15), ([15, 16, 17], 16)]
)
def test_row_A29_a_full_block_wastes_nothing_and_an_empty_sequence_holds_no_block(lens, waste):
    assert memory.paged_waste(lens, 16) == waste


def test_row_A29_bad_sizes_and_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match="block_size=0"):
        memory.paged_waste([1], 0)
    with pytest.raises(ValueError, match="lens="):
        memory.paged_waste([3, -1], 16)


@pytest.mark.parametrize(
    ("prompt", "full", "hit", "computed"),
    [(0, 0, 0, 0), (15, 0, 0, 15), (16, 1, 0, 16), (17, 1, 16, 1), (32, 2, 16, 16), (33, 2, 32, 1), (1000, 62, 992, 8)],
)
def test_row_A18_full_blocks_best_hit_and_what_is_computed_again(prompt, full, hit, computed):
    assert memory.best_prefix_hit(prompt) == memory.PrefixSplit(full, hit, computed)


def test_row_A35_losing_the_first_block_of_100000_tokens_strands_12_205_gib():
    stranded = memory.stranded_blocks(memory.blocks_for(100_000, 16), evicted=0)
    assert stranded == 6249
    assert stranded * KV_BLOCK / GIB == pytest.approx(12.205, abs=0.001)


def test_row_A35_of_32768_tokens_4_gib_and_losing_the_last_block_strands_nothing():
    assert memory.stranded_blocks(2048, 0) * KV_BLOCK / GIB == pytest.approx(4.0, abs=0.01)
    assert memory.stranded_blocks(2048, 2047) == 0


def test_row_A35_a_block_outside_the_chain_is_refused():
    with pytest.raises(ValueError, match="evicted=2"):
        memory.stranded_blocks(2, 2)


def blocks_of_an_8b_on_an_h100(**change):
    arguments = {"weight_bytes": 2 * LLAMA_3_8B.parameters, "shape": LLAMA_3_8B} | change
    return memory.num_blocks(79.18 * GIB, 0.92, activation_bytes=1.5 * GIB, graph_bytes=0.6 * GIB,
                             non_torch_bytes=0.9 * GIB, **arguments)  # fmt: skip


def test_row_A28_an_8b_on_an_h100_has_28102_blocks():
    blocks = blocks_of_an_8b_on_an_h100()
    assert blocks == 28_102
    assert blocks * 16 == 449_632
    assert blocks * 16 / 8192 == pytest.approx(54.9, rel=0.01)
    assert blocks * 16 / 131_072 == pytest.approx(3.43, rel=0.01)


def test_row_A28_two_gpus_halve_a_block_until_there_are_more_gpus_than_kv_heads():
    sizes = [memory.block_bytes(LLAMA_3_8B, tp=tp) for tp in (1, 2, 4, 8, 16)]
    assert sizes == [2 * MIB, MIB, MIB // 2, MIB // 4, MIB // 4]


def test_row_A28_fp8_doubles_the_blocks():
    assert blocks_of_an_8b_on_an_h100(kv_element_bytes=1) in (2 * 28_102, 2 * 28_102 + 1)


def test_row_A28_no_room_is_0_blocks():
    assert blocks_of_an_8b_on_an_h100(weight_bytes=2 * LLAMA_3_70B.parameters, shape=LLAMA_3_70B) == 0


def test_row_A28_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="tp=3"):
        memory.block_bytes(LLAMA_3_8B, tp=3)


@pytest.mark.parametrize(("shared", "blocks", "mib"), [(0, 300, 600), (1199, 78, 156), (1000, 114, 228)])
def test_row_A15_four_beams_over_1200_tokens(shared, blocks, mib):
    assert memory.beam_blocks(4, 1200, shared) == blocks
    assert blocks * KV_BLOCK / MIB == mib


def test_reserving_less_than_the_longest_sequence_is_refused():
    with pytest.raises(ValueError, match="longest=8"):
        memory.reserved_use([9], 8)


LONG = 131_072


@pytest.mark.parametrize(("shape", "full", "hybrid"), [(GPT_OSS_20B, 6.0, 3.0029), (GPT_OSS_120B, 9.0, 4.5044)])
def test_row_A33_gpt_oss_holds_half_of_its_kv_and_a_window(shape, full, hybrid):
    kv = memory.hybrid_kv(shape, LONG)
    assert (kv.one_table / GIB, round(kv.held / GIB, 4)) == (full, hybrid)
    assert round(kv.saving, 4) == 0.4995


def test_row_A33_half_of_gpt_oss_20b_is_3_gib_and_a_window_3_mib():
    assert memory.hybrid_kv(GPT_OSS_20B, LONG).held == 3 * GIB + 3 * MIB


@pytest.mark.parametrize("shape", [GPT_OSS_20B, GPT_OSS_120B])
@pytest.mark.parametrize(("in_flight", "blocks", "saving"), [(8192, 521, 0.4682), (2 * 8192, 1033, 0.4370)])
def test_row_A33_admission_counts_on_what_is_in_flight(shape, in_flight, blocks, saving):
    assert memory.reserved_blocks(LONG, 128, in_flight=in_flight) == blocks
    assert round(memory.hybrid_kv(shape, LONG, in_flight=in_flight).reserved_saving, 4) == saving


@pytest.mark.parametrize(("length", "percent"), [(128, 0), (512, 37.5), (2048, 46.875)])
def test_row_A33_the_saving_grows_with_the_context(length, percent):
    assert 100 * memory.hybrid_kv(GPT_OSS_20B, length).saving == percent


@pytest.mark.parametrize(
    ("pattern", "saving"), [((1024, None), 0.496), ((4096, None), 0.484), ((1024,) * 5 + (None,), 0.827)]
)
def test_row_A33_in_long_contexts_it_is_the_share_of_layers_with_a_window(pattern, saving):
    shape = replace(GPT_OSS_20B, window_pattern=pattern)
    assert round(memory.hybrid_kv(shape, LONG).saving, 3) == saving


def test_without_windows_nothing_is_saved():
    kv = memory.hybrid_kv(LLAMA_3_8B, 1000)
    assert kv.one_table == kv.held == kv.reserved == 63 * KV_BLOCK
    assert kv.saving == kv.reserved_saving == 0


def test_a_group_short_of_layers_costs_a_short_sequence_more_than_one_table():
    shape = replace(GPT_OSS_20B, num_layers=8, window_pattern=(128, 128, None, 128, 128, None, 128, None))
    assert memory.layers_per_block(shape.windows) == 3
    assert memory.hybrid_kv(shape, 16).saving == -1 / 8


@pytest.mark.parametrize(
    ("bad", "named"),
    [({"length": -1}, "length=-1"), ({"block_size": 0}, "block_size=0"), ({"in_flight": 0}, "in_flight=0")],
)
def test_sizes_that_make_no_sense_are_refused(bad, named):
    with pytest.raises(ValueError, match=named):
        memory.hybrid_kv(GPT_OSS_20B, **({"length": 100} | bad))

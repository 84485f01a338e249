"""Reading GGUF: configuration, layout of weights, block formats, and what is refused."""

import dataclasses
import math
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from minivllm.config import ModelError
from minivllm.models.gguf_model import gguf_name, half_split_rows
from minivllm.models.gguf_reader import read_gguf
from minivllm.models.layers import rotary_frequencies
from minivllm.models.loader import load_config, load_model, open_checkpoint
from minivllm.quant.gguf_formats import BLOCK_FORMATS, scales_and_minimums
from tests.model_files import LLAMA3_SCALING, tiny_config, write_gguf
from tests.random_weights import random_weights


def config_of(path):
    return load_config(open_checkpoint(path))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_written_model_comes_back_whole(tmp_path, architecture):
    config = tiny_config(architecture, tie_word_embeddings=architecture == "llama")
    tensors = random_weights(config)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", config, tensors), torch.float32)
    assert dataclasses.replace(loaded.config, rms_norm_eps=config.rms_norm_eps) == config
    assert math.isclose(loaded.config.rms_norm_eps, config.rms_norm_eps, rel_tol=1e-6)  # stored in float32
    assert loaded.weights.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded.weights[name], tensor), name


def test_weights_come_in_the_dtype_asked_for(tmp_path):
    config = tiny_config()
    loaded = load_model(write_gguf(tmp_path / "m.gguf", config, random_weights(config)), torch.bfloat16)
    assert {w.dtype for w in loaded.weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_matrices_are_decoded(tmp_path, kind):
    config = tiny_config("qwen3")
    tensors = random_weights(config)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", config, tensors, kind=kind), torch.float32)
    name = "model.layers.1.mlp.down_proj.weight"
    stored = gguf.GGMLQuantizationType[kind]
    expected = dequantize(gguf.quants.quantize(tensors[name].numpy(), stored), stored)
    assert np.array_equal(loaded.weights[name].numpy(), expected)


def test_names_map_to_those_of_the_format():
    assert gguf_name("model.layers.3.self_attn.q_proj.weight") == "blk.3.attn_q.weight"
    assert gguf_name("model.layers.0.self_attn.k_proj.bias") == "blk.0.attn_k.bias"
    assert gguf_name("lm_head.weight") == "output.weight"


def test_half_split_rows_by_hand():
    interleaved = torch.tensor([[0.0], [2.0], [1.0], [3.0], [4.0], [6.0], [5.0], [7.0]])  # two heads of four rows
    assert half_split_rows(interleaved, heads=2).flatten().tolist() == list(range(8))


# block formats, against a decoder of one weight at a time written from the layout


def half(block, at):
    return struct.unpack_from("<e", block, at)[0]


def six_bit(block, at, j):
    """Scale and minimum of sub-block j, from the 12 packed bytes at `at`."""
    q = block[at : at + 12]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def q4_k(block, i):
    scale, minimum = six_bit(block, 4, i // 32)
    nibble = block[16 + i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2)) & 15
    return half(block, 0) * scale * nibble - half(block, 2) * minimum


def q5_k(block, i):
    scale, minimum = six_bit(block, 4, i // 32)
    nibble = block[48 + i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2)) & 15
    fifth = block[16 + i % 32] >> (i // 32) & 1
    return half(block, 0) * scale * (nibble + 16 * fifth) - half(block, 2) * minimum


def q6_k(block, i):
    part, j = divmod(i, 128)
    low = block[part * 64 + j % 64] >> (4 * (j // 64)) & 15
    upper = block[128 + part * 32 + j % 32] >> (2 * (j // 32)) & 3
    sub_scale = struct.unpack_from("<b", block, 192 + i // 16)[0]
    return half(block, 208) * sub_scale * (low + 16 * upper - 32)


def q4_0(block, i):
    return half(block, 0) * ((block[2 + i % 16] >> (4 * (i // 16)) & 15) - 8)


def q4_1(block, i):
    return half(block, 0) * (block[4 + i % 16] >> (4 * (i // 16)) & 15) + half(block, 2)


def q5_0(block, i):
    fifth = block[2 + i // 8] >> (i % 8) & 1
    return half(block, 0) * ((block[6 + i % 16] >> (4 * (i // 16)) & 15) + 16 * fifth - 16)


def q5_1(block, i):
    fifth = block[4 + i // 8] >> (i % 8) & 1
    return half(block, 0) * ((block[8 + i % 16] >> (4 * (i // 16)) & 15) + 16 * fifth) + half(block, 2)


def q8_0(block, i):
    return half(block, 0) * struct.unpack_from("<b", block, 2 + i)[0]


SCALAR_DECODERS = {2: q4_0, 3: q4_1, 6: q5_0, 7: q5_1, 8: q8_0, 12: q4_k, 13: q5_k, 14: q6_k}
SCALES_AT = {2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 12: (0, 2), 13: (0, 2), 14: (208,)}


def random_blocks(kind, count=8, seed=0):
    """Random bytes, but for the float16 scales: those are finite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCK_FORMATS[kind].block_bytes), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        blocks[:, at : at + 2] = rng.normal(size=(count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", SCALAR_DECODERS, ids=lambda kind: BLOCK_FORMATS[kind].name)
def test_blocks_decode_as_their_layout_says(kind):
    blocks, form = random_blocks(kind), BLOCK_FORMATS[kind]
    decoded = form.decode(torch.from_numpy(blocks))
    assert decoded.shape == (8, form.block_elements)
    assert decoded.dtype == torch.float32
    expected = [[SCALAR_DECODERS[kind](bytes(b), i) for i in range(form.block_elements)] for b in blocks]
    torch.testing.assert_close(decoded, torch.tensor(expected), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", SCALAR_DECODERS, ids=lambda kind: BLOCK_FORMATS[kind].name)
def test_blocks_decode_to_the_bits_of_the_gguf_package(kind):
    blocks = random_blocks(kind, count=64, seed=1)
    expected = dequantize(blocks, gguf.GGMLQuantizationType(kind))
    assert np.array_equal(BLOCK_FORMATS[kind].decode(torch.from_numpy(blocks)).numpy(), expected)


def test_sixteen_six_bit_numbers_unpack_from_twelve_bytes():
    scales, minimums = range(40, 48), range(56, 64)
    packed = [0] * 12
    for j in range(4):
        packed[j] = scales[j] | scales[j + 4] >> 4 << 6
        packed[j + 4] = minimums[j] | minimums[j + 4] >> 4 << 6
        packed[j + 8] = scales[j + 4] & 15 | (minimums[j + 4] & 15) << 4
    found = scales_and_minimums(torch.tensor([packed], dtype=torch.uint8))
    assert [t.tolist() for t in found] == [[list(scales)], [list(minimums)]]


# rotary embedding


def with_divisors(tmp_path, divisors):
    config = tiny_config(rope_theta=500_000.0)
    return write_gguf(tmp_path / "m.gguf", config, {**random_weights(config), "rope_freqs.weight": divisors})


def test_llama3_scaling_is_recovered_from_the_divisors(tmp_path):
    config = tiny_config(rope_theta=500_000.0)
    scaled = dataclasses.replace(config, rope_scaling=LLAMA3_SCALING)
    divisors = (rotary_frequencies(config) / rotary_frequencies(scaled)).float()
    assert config_of(with_divisors(tmp_path, divisors)).rope_scaling == LLAMA3_SCALING


def test_divisors_of_another_method_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no llama3 scaling"):
        config_of(with_divisors(tmp_path, torch.linspace(1, 8, 8)))


def test_other_rope_scalings_are_refused_by_name(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), llama__rope__scaling__type="yarn")
    with pytest.raises(ModelError, match="rope scaling yarn is not supported"):
        config_of(path)


def test_partly_rotated_heads_are_refused(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), extra={"llama.rope.dimension_count": 8})
    with pytest.raises(ModelError, match="8 of 16 head elements"):
        config_of(path)


def test_without_a_key_length_heads_share_the_hidden_size(tmp_path):
    config = tiny_config(head_dim=8)
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), omit=("llama.attention.key_length",))
    assert config_of(path).head_dim == 8


def test_end_of_turn_ends_an_answer_too(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), extra={"tokenizer.ggml.eot_token_id": 259})
    assert load_model(path, torch.float32).tokenizer.eos_token_ids == (261, 259)


# refused files


@pytest.fixture
def tiny_gguf(tmp_path):
    config = tiny_config()
    return write_gguf(tmp_path / "m.gguf", config, random_weights(config))


def test_a_file_cut_anywhere_is_refused_in_one_line(tiny_gguf, tmp_path):
    content = tiny_gguf.read_bytes()
    for length in [*range(1, 400, 13), 1000, 4000, len(content) // 2, len(content) - 64]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf: ") as caught:
            read_gguf(cut)
        assert "\n" not in str(caught.value)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match="can't be read"):
        read_gguf(tmp_path / "m.gguf")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelError, match="can't be read"):
        read_gguf(tmp_path / "nothing.gguf")


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_text("not a model at all")
    with pytest.raises(ModelError, match="is no GGUF file"):
        read_gguf(tmp_path / "m.gguf")


def test_another_version_is_refused(tiny_gguf):
    content = bytearray(tiny_gguf.read_bytes())
    content[4:8] = struct.pack("<I", 1)
    tiny_gguf.write_bytes(content)
    with pytest.raises(ModelError, match="GGUF version 1 is not supported"):
        read_gguf(tiny_gguf)


def test_another_architecture_is_refused_by_name(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture gemma3 is not supported"):
        config_of(path)


def test_an_unsupported_tensor_type_is_refused_by_name(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((1, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"token_embd.weight is quantised as Q2_K, .* use a file of F32"):
        read_gguf(path)


def test_sliding_windows_are_refused(tmp_path):
    config = tiny_config()
    path = write_gguf(
        tmp_path / "m.gguf", config, random_weights(config), extra={"llama.attention.sliding_window": 4096}
    )
    with pytest.raises(ModelError, match="sliding windows"):
        config_of(path)


def test_mixtures_of_experts_are_refused(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), extra={"llama.expert_count": 8})
    with pytest.raises(ModelError, match="mixture-of-experts"):
        config_of(path)


def test_a_missing_weight_is_named(tmp_path):
    config = tiny_config()
    tensors = random_weights(config)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "m.gguf", config, tensors)
    with pytest.raises(ModelError, match=r"m\.gguf: weight model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(path, torch.float32)


def test_a_misshapen_weight_is_named_with_both_shapes(tmp_path):
    config = tiny_config()
    tensors = {**random_weights(config), "model.norm.weight": torch.ones(31)}
    path = write_gguf(tmp_path / "m.gguf", config, tensors)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(31,\), its configuration says \(32,\)"):
        load_model(path, torch.float32)


def test_missing_metadata_is_named(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), omit=("llama.block_count",))
    with pytest.raises(ModelError, match=r"metadata llama\.block_count is missing"):
        config_of(path)


def test_an_impossible_configuration_names_the_file(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), extra={"llama.attention.head_count_kv": 3})
    path_error = r"m\.gguf: its configuration is not usable \(num_kv_heads=3"
    with pytest.raises(ModelError, match=path_error):
        config_of(path)

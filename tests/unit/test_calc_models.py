"""Shapes reproduce the published parameter counts and the KV bytes that every estimate starts from."""

import pytest

from minivllm.calc import models


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        (models.LLAMA_3_8B, 8_030_261_248),
        (models.LLAMA_3_70B, 70_553_706_496),
        (models.SMOLLM2_135M, 134_515_008),
    ],
)
def test_parameters_computed_from_the_shape_equal_the_published_count(shape, published):
    assert shape.parameters == published


@pytest.mark.parametrize(
    ("shape", "published_billions"),
    [
        (models.LLAMA_31_405B, 405.85),
        (models.QWEN3_06B, 0.596),
        (models.QWEN3_17B, 1.721),
        (models.QWEN3_4B, 4.022),
        (models.QWEN3_8B, 8.191),
        (models.QWEN3_14B, 14.77),
        (models.QWEN3_32B, 32.76),
        (models.QWEN3_30B_A3B, 30.53),
        (models.QWEN3_235B_A22B, 235.09),
        (models.GPT_OSS_20B, 20.91),
        (models.GPT_OSS_120B, 116.83),
    ],
)
def test_parameters_agree_with_the_published_billions_to_all_printed_digits(shape, published_billions):
    digits = len(str(published_billions).split(".")[1])
    assert round(shape.parameters / 1e9, digits) == published_billions


@pytest.mark.parametrize(("shape", "billions"), [(models.GPT_OSS_20B, 3.61), (models.GPT_OSS_120B, 5.13)])
def test_gpt_oss_publishes_its_active_parameters_without_the_input_embedding(shape, billions):
    embedding = shape.vocab_size * shape.hidden_size
    assert round((shape.active_parameters - embedding) / 1e9, 2) == billions


def test_a_dense_model_has_only_active_parameters():
    assert models.LLAMA_3_8B.active_parameters == models.LLAMA_3_8B.parameters


@pytest.mark.parametrize(
    ("shape", "bytes_per_token"),
    [
        (models.LLAMA_3_8B, 131_072),
        (models.LLAMA_3_70B, 327_680),
        (models.LLAMA_31_405B, 516_096),
        (models.QWEN3_06B, 114_688),
        (models.QWEN3_8B, 147_456),
        (models.QWEN3_30B_A3B, 98_304),
        (models.GPT_OSS_20B, 49_152),
        (models.SMOLLM2_135M, 23_040),
    ],
)
def test_kv_bytes_of_a_token_in_bfloat16(shape, bytes_per_token):
    assert shape.kv_bytes_per_token() == bytes_per_token


def test_gpt_oss_alternates_a_window_of_128_with_full_attention():
    assert models.GPT_OSS_20B.windows == (128, None) * 12
    assert models.LLAMA_3_8B.windows == (None,) * 32


def test_latent_attention_keeps_one_vector_a_layer_whatever_the_heads():
    assert models.mla_kv_bytes_per_token(num_layers=61, latent=512, rope=64) == 70_272


def test_the_smallest_shape_is_the_default_model_and_shapes_are_unique():
    assert models.SHAPES[0] is models.SMOLLM2_135M
    assert len({shape.name for shape in models.SHAPES}) == len(models.SHAPES)

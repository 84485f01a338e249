"""Flags become configurations; sizes have units; a command gets the flags of its groups."""

import dataclasses

import pytest
from typer import Typer
from typer.testing import CliRunner

from minivllm.cli.app import app as minivllm
from minivllm.cli.flags import EngineFlags, SamplingFlags, parse_size, with_flags
from minivllm.config import ConfigError, EngineConfig, RequestError
from minivllm.request import SamplingParams


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5gi", 3 * 2**29), ("64k", 64_000), ("7 B", 7)],
)
def test_sizes_have_decimal_and_binary_units(text: str, size: int):
    assert parse_size("kv_cache_memory", text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1", "5i", "1 TB", "1e9"])
def test_a_bad_size_names_the_setting_and_shows_a_good_one(text: str):
    with pytest.raises(ConfigError, match=r"kv_cache_memory=.*512MiB"):
        parse_size("kv_cache_memory", text)


def test_flags_without_values_are_the_default_configuration():
    assert EngineFlags().config() == EngineConfig()


def test_every_engine_flag_reaches_the_configuration():
    flags = EngineFlags(
        kv_cache_memory="1MiB", num_kv_blocks=9, block_size=4, max_model_len="64", max_num_batched_tokens=32, max_num_seqs=2,
        enable_prefix_caching=False, enable_chunked_prefill=False, policy="priority", dtype="float32", device="cpu",
        attention_backend="reference", trace_file="t.jsonl", memory_utilization=0.5, hybrid="off", watermark=0.1,
        spec_method="ngram", spec_ngram_min=3, spec_ngram_max=6,
    )  # fmt: skip
    assert flags.config() == EngineConfig(
        kv_cache_memory=2**20, num_kv_blocks=9, block_size=4, max_model_len=64, max_num_batched_tokens=32, max_num_seqs=2,
        enable_prefix_caching=False, enable_chunked_prefill=False, policy="priority", dtype="float32", device="cpu",
        attention_backend="reference", trace_file="t.jsonl", memory_utilization=0.5, hybrid="off", watermark=0.1,
        spec_method="ngram", spec_ngram_min=3, spec_ngram_max=6,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ("--hybrid off", {"hybrid": "off"}),
        ("--partial-block-hits", {"partial_block_hits": True}),
        ("--watermark 0.25", {"watermark": 0.25}),
        ("--long-prefill-threshold 64", {"long_prefill_threshold": 64}),
        ("--spec-ngram-min 3", {"spec_ngram_min": 3}),
        ("--spec-ngram-max 6", {"spec_ngram_max": 6}),
        ("--no-prefix-caching", {"enable_prefix_caching": False}),
        ("--tp 2", {"tensor_parallel_size": 2}),
    ],
)
def test_words_on_the_command_line_become_settings(words: str, setting: dict[str, object]):
    assert parsed(words).config() == EngineConfig(**setting)


def parsed(words: str) -> EngineFlags:
    """The engine flags that a command gets from its arguments."""
    got = []
    app = Typer()

    @app.command()
    @with_flags
    def command(engine: EngineFlags) -> None:
        """A command."""
        got.append(engine)

    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.stderr
    return got[0]


@pytest.mark.parametrize("command", ["ask", "chat", "generate", "bench", "plan", "trace"])
def test_help_is_not_cut_off_on_a_terminal_of_80_columns(command: str):
    result = CliRunner().invoke(minivllm, [command, "--help"], env={"COLUMNS": "80"})
    assert max(map(len, result.stdout.splitlines())) == 80
    assert "…" not in result.stdout


def test_every_sampling_flag_reaches_the_parameters():
    flags = SamplingFlags(max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=7, stop=["a", "b"])
    assert flags.params(n=2) == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=7, stop=("a", "b"), n=2
    )


def test_without_flags_the_most_likely_token_is_taken():
    assert SamplingFlags().params().temperature == 0


def test_a_chat_has_defaults_of_its_own_and_a_greedy_one_can_be_asked_for():
    assert SamplingFlags().with_defaults(temperature=0.2, top_p=0.9).params().temperature == 0.2
    assert SamplingFlags(temperature=0).with_defaults(temperature=0.2, top_p=0.9).params().temperature == 0


def test_bad_flags_raise_the_error_of_the_setting():
    with pytest.raises(ConfigError, match="policy="):
        EngineFlags(policy="lottery").config()
    with pytest.raises(RequestError, match="temperature="):
        SamplingFlags(temperature=-1).params()


def test_a_command_gets_one_flag_for_each_field_of_its_groups():
    got = []
    app = Typer()

    @app.command()
    @with_flags
    def command(sampling: SamplingFlags, word: str) -> None:
        """A command."""
        got.append((sampling, word))

    result = CliRunner().invoke(app, ["--top-k", "4", "--stop", "x", "--stop", "y", "hello"])
    assert result.exit_code == 0
    (sampling, word) = got[0]
    assert word == "hello"
    assert sampling == dataclasses.replace(SamplingFlags(), top_k=4, stop=["x", "y"])

"""`generate` with a guide, on a tiny random model."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm.cli.app import app
from minivllm.cli.guided import GuidedFlags
from minivllm.config import RequestError
from minivllm.request import GuidedChoice, GuidedJson, GuidedRegex
from tests.cli_support import write_tiny_model

SCHEMA = '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def generate(model: Path, *words: str):
    small = ("--kv-cache-memory", "64KiB", "--dtype", "float32", "--max-tokens", "40")
    return CliRunner().invoke(app, ["generate", "--model", str(model), *small, "-p", "hello", *words])


def test_a_schema_guides_the_answer_given_as_it_is_or_in_a_file(model: Path, tmp_path: Path):
    file = tmp_path / "schema.json"
    file.write_text(SCHEMA)
    given, read = generate(model, "--guided-json", SCHEMA), generate(model, "--guided-json", str(file))
    assert given.stdout == read.stdout
    assert [type(item) for item in json.loads(given.stdout)] == [bool, bool]


def test_log_probabilities_of_a_guided_answer_are_numbers_that_json_has(model: Path):
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    told = json.loads(
        generate(model, "--guided-choice", "yes,no", "--logprobs", "10", "--json").stdout, parse_constant=refuse
    )
    assert len(told["logprobs"][0]["top"]) == 2


def test_a_pattern_and_choices_guide_the_answer(model: Path):
    assert re.fullmatch(r"\d{3}-\d", generate(model, "--guided-regex", r"\d{3}-\d").stdout.strip())
    assert generate(model, "--guided-choice", "yes,no").stdout.strip() in ("yes", "no")


def test_each_flag_becomes_its_guide():
    assert GuidedFlags().guided() is None
    assert GuidedFlags(guided_json="{}").guided() == GuidedJson()
    assert GuidedFlags(guided_regex="a+").guided() == GuidedRegex("a+")
    assert GuidedFlags(guided_choice="a,b c").guided() == GuidedChoice(("a", "b c"))


def test_two_guides_and_files_that_are_not_there_are_refused():
    with pytest.raises(RequestError, match="give one of --guided-json"):
        GuidedFlags(guided_json="{}", guided_regex="a").guided()
    with pytest.raises(RequestError, match=r"guided_json='missing\.json': .*No such file"):
        GuidedFlags(guided_json="missing.json").guided()


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [("--guided-json", '{"not": {}}', "#/not"), ("--guided-regex", "(a|b)*a(a|b){30}", "too large"), ("--guided-regex", "(", "without")],
)  # fmt: skip
def test_a_guide_that_can_not_be_followed_is_an_error_in_one_line(model: Path, flag: str, value: str, why: str):
    result = generate(model, flag, value)
    assert result.exit_code == 2
    assert why in result.stderr
    assert result.stderr.count("\n") == 1

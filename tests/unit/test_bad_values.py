"""What a bad value of a setting or of a request's parameter is told."""

import pytest

from minivllm.config import ConfigError, EngineConfig, RequestError
from minivllm.request import BeamParams, GuidedChoice, SamplingParams


@pytest.mark.parametrize("value", ["x", None, 2])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (BeamParams, "early_stopping"),
        (SamplingParams, "ignore_eos"),
        (EngineConfig, "enable_prefix_caching"),
    ],
)
def test_a_switch_is_true_or_false(make: type, field: str, value: object):
    with pytest.raises(ConfigError, match="must be one of True, False") as refusal:
        make(**{field: value})
    assert (refusal.value.field, refusal.value.value) == (field, value)


def test_of_a_long_value_the_beginning_is_told():
    with pytest.raises(RequestError) as refusal:
        GuidedChoice("word " * 10**5)
    assert str(refusal.value).startswith("guided='word word ")
    assert str(refusal.value).endswith(": choices must be a list of at least one text")
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("choices", [5, None, (), "ab", [1], {"a": "b"}])
def test_choices_are_a_list_of_texts(choices: object):
    with pytest.raises(RequestError, match="choices must be a list of at least one text"):
        GuidedChoice(choices)


@pytest.mark.parametrize("factor", [0, -1, 1e-300, 1e300, float("nan"), float("inf"), True, "1"])
def test_a_repetition_penalty_is_from_a_hundredth_to_a_hundred(factor: object):
    with pytest.raises(RequestError, match="repetition_penalty="):
        SamplingParams(repetition_penalty=factor)
    assert {SamplingParams(repetition_penalty=good).repetition_penalty for good in (0.01, 1.3, 100)} == {0.01, 1.3, 100}

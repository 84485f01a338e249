"""The default model fills in a schema; its vocabulary has holes, which the masks know."""

import json

import jsonschema
import pytest

from minivllm.bench.workloads import W6_SCHEMA, small_objects
from minivllm.config import EngineConfig, RequestError
from minivllm.engine.grammars import compile_grammar
from minivllm.llm import LLM
from minivllm.request import FinishReason, GuidedJson, GuidedRegex, SamplingParams
from minivllm.sample.grammar.mask import Matcher
from tests.grammar_support import bits

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(config=EngineConfig(dtype="float32", num_kv_blocks=65))


def test_greedy_answers_are_valid_json(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=128, guided=GuidedJson(W6_SCHEMA))
    for output in llm.generate(small_objects(0)[:2], params):
        completion = output.outputs[0]
        assert completion.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(completion.text), W6_SCHEMA)


def test_a_byte_that_no_token_holds_is_never_begun(llm: LLM):
    vocabulary = llm.engine.core.grammars.vocabulary
    assert not vocabulary.texts.keys() & llm.tokenizer.special_ids
    assert sum(byte not in vocabulary.single_bytes for byte in range(256)) == 21
    with pytest.raises(RequestError, match="no text matches"):
        compile_grammar(GuidedRegex("a\\x04"), vocabulary)
    matcher = Matcher(compile_grammar(GuidedRegex("a\\x04|ab"), vocabulary))
    assert {vocabulary.texts[i] for i, bit in enumerate(bits(matcher.row(), vocabulary.size)) if bit} == {b"a", b"ab"}
    matcher.accept(llm.tokenizer.encode("a")[0])
    assert {vocabulary.texts[i] for i, bit in enumerate(bits(matcher.row(), vocabulary.size)) if bit} == {b"b"}

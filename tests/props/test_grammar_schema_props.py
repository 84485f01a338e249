"""Whatever the schema, the vocabulary and the logits: a document that comes to its own end is valid."""

import json
import string

import jsonschema
from hypothesis import given
from hypothesis import strategies as st

from minivllm.config import RequestError
from minivllm.engine.grammars import compile_grammar
from minivllm.request import GuidedJson
from minivllm.sample.grammar.automaton import build_automaton
from minivllm.sample.grammar.schema import parse_schema
from tests.grammar_support import make_vocabulary, write_at_random

names = st.sampled_from(["a", "b", "né", 'q"', ""])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("aé\\\n", max_size=3) | st.sampled_from([0.5, 1e30]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=3,
)


@st.composite
def bounded(draw: st.DrawFn, type_name: str, keywords: tuple[str, str], low: int, high: int) -> dict:
    """A schema of one type with a lower bound, an upper one, both or none."""
    bounds = sorted((draw(st.integers(low, high)), draw(st.integers(low, high))))
    return {"type": type_name} | {k: v for k, v in zip(keywords, bounds, strict=True) if draw(st.booleans())}


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[object]) -> dict:
    properties = draw(st.dictionaries(names, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    more = draw(st.booleans() | inner) if not properties else draw(st.booleans())
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def nested(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    lists = st.tuples(bounded("array", ("minItems", "maxItems"), 0, 3), inner).map(lambda p: p[0] | {"items": p[1]})
    return lists | objects(inner) | st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options})


leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "number"}, {"type": ["string", "null"]}]),
    st.lists(st.sampled_from(["null", "boolean", "number", "integer", "string"]), min_size=2, unique=True).map(
        lambda types: {"type": types}
    ),
    st.sampled_from(["^a+é?$", '"', "^[^b-z]{0,3}$", "^(x|y\\n)*$", r"^\S\D?$", r"^[^\w\s]\W$"]).map(
        lambda p: {"type": "string", "pattern": p}
    ),
    bounded("integer", ("minimum", "maximum"), -500, 500),
    bounded("integer", ("exclusiveMinimum", "maximum"), -500, 0).filter(
        lambda s: s.get("exclusiveMinimum", -1) < s.get("maximum", 0)
    ),
    bounded("string", ("minLength", "maxLength"), 0, 4),
    st.lists(values, min_size=1, max_size=3).map(lambda options: {"enum": options}),
    values.map(lambda value: {"const": value}),
    st.just({"$ref": "#/$defs/shared"}),
)
schemas = st.builds(
    lambda schema, shared: schema | {"$defs": {"shared": shared}},
    st.recursive(leaves, nested, max_leaves=5),
    st.sampled_from([{"type": "integer"}, {"enum": ["x", 1]}, {}]),
)

ALL_BYTES = [bytes([value]) for value in range(256)]
PIECES = ['{"', '":', '": ', ", ", '","', "true", "null", "é", "10", '"}', "]}", "\\n", "né", "\\", "a}", '"']
chunks = st.lists(st.sampled_from([piece.encode() for piece in PIECES]), max_size=12)
holes = st.lists(st.sampled_from(list(string.printable.encode()) + list("é".encode())), max_size=3)


@given(schemas, chunks, holes, st.integers(0, 2**32), st.sampled_from([0.0, 3.0]))
def test_a_document_that_ends_is_valid(schema, pieces, missing, seed, eos_bias):
    texts = [piece for piece in ALL_BYTES if piece[0] not in missing] + pieces
    try:
        grammar = compile_grammar(GuidedJson(schema), make_vocabulary(texts))
    except RequestError:
        assert missing, "every byte has a token, so every document has a spelling"
        return
    written = write_at_random(grammar, seed, 60, eos_bias)
    if written.ended:
        jsonschema.validate(json.loads(written.text), schema)


@given(schemas, values)
def test_a_document_that_an_automaton_takes_is_valid(schema, value):
    automaton = build_automaton(parse_schema(json.dumps(schema)))
    if automaton.matches(json.dumps(value, ensure_ascii=False).encode()):
        jsonschema.validate(value, schema)

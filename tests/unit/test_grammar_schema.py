"""JSON schemas become automata of documents that they allow; a keyword that isn't known is refused with its path."""

import json
import re

import jsonschema
import pytest

from minivllm.config import RequestError
from minivllm.engine.grammars import compile_grammar, language_of
from minivllm.request import GuidedChoice, GuidedJson, GuidedRegex
from minivllm.sample.grammar.automaton import Automaton, build_automaton
from minivllm.sample.grammar.json_text import ANY_DEPTH, LARGEST, integer
from minivllm.sample.grammar.schema import parse_schema
from tests.grammar_support import make_vocabulary


def automaton(schema: object) -> Automaton:
    return build_automaton(parse_schema(json.dumps(schema)))


def takes(schema: object, *documents: object) -> list[bool]:
    """Whether a schema's automaton takes each document, as `json.dumps` writes it."""
    machine = automaton(schema)
    return [machine.matches(json.dumps(document, ensure_ascii=False).encode()) for document in documents]


# documents


def test_a_schema_without_keywords_takes_any_document_up_to_its_depth():
    documents = [1, -2.5, 1e20, 'a\n"\\é😀', True, None, [], {}, [[1, 2.0], {"a": {"b": "c"}}], {"a": [], "": {}}]
    assert all(takes({}, *documents))
    deepest = "[" * ANY_DEPTH + "]" * ANY_DEPTH
    assert automaton(True).matches(deepest.encode())
    assert not automaton(True).matches(f"[{deepest}]".encode())


@pytest.mark.parametrize(
    "text", ["", "01", "+1", "1.", ".5", "'a'", '"\n"', "tru", "[1,]", "{1:2}", '{"a"}', "[1 2]", '"\\x"', " 1"]
)
def test_what_is_no_json_is_not_taken(text: str):
    assert not automaton({}).matches(text.encode())


def test_white_space_is_one_space_after_a_comma_or_a_colon():
    machine = automaton({})
    for text in ("[1,2]", "[1, 2]", '{"a": 1,"b":2}'):
        assert machine.matches(text.encode())
    for text in ("[ 1]", "[1 ,2]", "[1,  2]", "[1,\n2]", '{"a" :1}'):
        assert not machine.matches(text.encode())


def test_fields_come_in_order_and_only_optional_ones_are_left_out():
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in "abc"},
        "required": ["b"],
        "additionalProperties": False,
    }
    good = [{"a": 1, "b": 2, "c": 3}, {"b": 2}, {"a": 1, "b": 2}, {"b": 2, "c": 3}]
    bad = [{}, {"a": 1}, {"a": 1, "c": 3}, {"c": 3, "b": 2}, {"b": "2"}, {"b": 2, "d": 4}]
    assert takes(schema, *good, *bad) == [True] * 4 + [False] * 6
    del schema["required"]
    assert takes(schema, {}, {"c": 1}, {"a": 1, "c": 1}) == [True] * 3


def test_an_object_without_properties_is_a_mapping():
    assert takes({"type": "object"}, {}, {"a": [1], "b": "x"}) == [True, True]
    numbers = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert takes(numbers, {"a": 1, "b": 2}, {"a": "x"}) == [True, False]
    assert takes({"type": "object", "additionalProperties": False}, {}, {"a": 1}) == [True, False]


def test_lists_and_strings_have_their_lengths():
    lists = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
    assert takes(lists, [], [True], [True, False], [True] * 3, [1]) == [False, True, True, False, False]
    strings = {"type": "string", "minLength": 1, "maxLength": 2}
    assert takes(strings, "", "é", '"\n', "abc", "😀😀") == [False, True, True, False, True]


def test_a_pattern_speaks_of_characters_and_not_of_their_spelling():
    assert takes({"type": "string", "pattern": '^["\\\\]+$'}, '"', "\\\\", "a", "") == [True, True, False, False]
    assert takes({"type": "string", "pattern": "b"}, "abc", "b", "ac") == [True, True, False]
    assert takes({"type": "string", "pattern": r"^\d{3}-\d{4}$"}, "555-1234", "5551234") == [True, False]
    assert takes({"type": "string", "pattern": "^[^a]$"}, "\n", "é", "a") == [True, True, False]


@pytest.mark.parametrize(
    "pattern", [r"^\S$", r"^\D$", r"^\W$", r"^[^\s]$", r"^[^\d]$", r"^[^\w.]$", r"^[\S]$", r"^[^\S]$", r"^\s$"]
)
def test_what_readers_of_a_pattern_may_hold_for_a_space_digit_or_letter_is_neither_that_nor_its_opposite(pattern: str):
    machine = automaton({"type": "string", "pattern": pattern})
    written = [c for c in map(chr, range(32, 0x3100)) if machine.matches(json.dumps(c, ensure_ascii=False).encode())]
    assert written or pattern == r"^[^\S]$"
    for flags in (re.ASCII, re.UNICODE):
        assert all(re.search(pattern, c, flags) for c in written)


def test_the_opposite_of_a_set_takes_what_all_readers_agree_on():
    assert takes({"type": "string", "pattern": r"^\S+$"}, "é漢😀", "a\u00a0b") == [True, False]
    assert takes({"type": "string", "pattern": r"^\D\W[^\w]$"}, "é-…", "\u0663--", "aé-") == [True, False, False]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (0, 120), (7, 7), (95, 1203), (-5, 5), (-1203, -95), (-10, 0), (100, 999), (18, 4321)]
)
def test_integers_are_those_between_their_bounds(low: int, high: int):
    machine = build_automaton(integer(low, high))
    for value in range(low - 12, high + 13):
        assert machine.matches(str(value).encode()) == (low <= value <= high), value
    assert not machine.matches(b"-0")
    assert not machine.matches(b"007")


def test_integers_have_18_digits_at_most():
    machine = automaton({"type": "integer"})
    for value in (0, 10, LARGEST, -LARGEST):
        assert machine.matches(str(value).encode())
    assert not machine.matches(str(LARGEST + 1).encode())


def test_bounds_may_be_exclusive_and_need_not_be_whole():
    schema = {"type": "integer", "exclusiveMinimum": 0, "maximum": 3.5}
    assert takes(schema, 0, 1, 3, 4) == [False, True, True, False]
    schema = {"type": "integer", "minimum": -1.5, "exclusiveMaximum": 2}
    assert takes(schema, -2, -1, 1, 2) == [False, True, True, False]


def test_several_types_enum_const_and_any_of():
    assert takes({"type": ["integer", "null"], "minimum": 3}, 3, None, 2, "3") == [True, True, False, False]
    assert takes({"enum": ["a b", 1, None, [1, {"x": 2}]]}, "a b", 1, None, [1, {"x": 2}], 2)[:4] == [True] * 4
    assert takes({"enum": ["1", 1, True, 1.0], "type": "integer"}, "1", 1, True) == [False, True, False]
    assert takes({"const": {"kind": "é"}}, {"kind": "é"}, {"kind": "e"}) == [True, False]
    assert takes({"anyOf": [{"type": "integer"}, {"const": "x"}]}, 5, "x", "y") == [True, True, False]


PYDANTIC = {
    "$defs": {
        "Address": {
            "properties": {
                "street": {"title": "Street", "type": "string"},
                "kind": {"$ref": "#/$defs/Kind", "default": "home"},
            },
            "required": ["street"],
            "title": "Address",
            "type": "object",
        },
        "Kind": {"enum": ["home", "work"], "title": "Kind", "type": "string"},
    },
    "properties": {
        "name": {"description": "Full name", "maxLength": 20, "title": "Name", "type": "string"},
        "age": {
            "anyOf": [{"exclusiveMinimum": 0, "type": "integer"}, {"type": "null"}],
            "default": None,
            "title": "Age",
        },
        "addresses": {"items": {"$ref": "#/$defs/Address"}, "title": "Addresses", "type": "array"},
        "scores": {"additionalProperties": {"type": "number"}, "title": "Scores", "type": "object"},
        "mode": {"const": "fast", "title": "Mode", "type": "string"},
        "extra": {"title": "Extra"},
    },
    "required": ["name", "addresses", "mode"],
    "title": "Person",
    "type": "object",
}
"""What Pydantic 2.11 writes for a model with a nested model, an enum, an optional bounded integer, a dict, a Literal and Any."""


def test_a_schema_of_pydantic_is_taken():
    person = {
        "name": "Al",
        "age": 3,
        "addresses": [{"street": "A"}, {"street": "B", "kind": "work"}],
        "scores": {"x": 1.5},
        "mode": "fast",
        "extra": [1],
    }
    small = {"name": "Al", "addresses": [], "mode": "fast"}
    for document in (person, small):
        jsonschema.validate(document, PYDANTIC)
    assert takes(PYDANTIC, person, small, person | {"age": 0}, small | {"mode": "slow"}) == [True, True, False, False]


def test_definitions_that_are_used_often_are_translated_once():
    definitions = {
        f"D{i}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/D{i + 1}"} for name in "ab"}}
        for i in range(12)
    }
    definitions["D12"] = {"type": "null"}
    schema = {"$ref": "#/$defs/D0", "$defs": definitions}
    parse_schema(json.dumps(schema))  # 2 ** 12 ways lead to D12
    with pytest.raises(RequestError, match="too large for an automaton"):
        compile_grammar(GuidedJson(schema), make_vocabulary([b"{"]))


# refusals


@pytest.mark.parametrize(
    ("schema", "path", "why"),
    [
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems", "keyword uniqueItems is not supported for type array"),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}, "#/properties/a/format", "format"),
        ({"type": "array", "items": {"oneOf": []}}, "#/items/oneOf", "oneOf is not supported without a type"),
        ({"anyOf": [{"type": "integer", "multipleOf": 2}]}, "#/anyOf/0/multipleOf", "multipleOf"),
        ({"type": "number", "minimum": 1}, "#/minimum", "minimum is not supported for type number"),
        ({"type": ["integer", "number"], "minimum": 100}, "#/minimum", "minimum is not supported for type number"),
        ({"properties": {}}, "#/properties", "without a type beside it"),
        ({"enum": [1], "minimum": 0}, "#/minimum", "beside enum"),
        ({"$ref": "#/$defs/a", "type": "object", "$defs": {"a": {}}}, "#/type", "beside \\$ref"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "#/pattern", "beside minLength or maxLength"),
        ({"type": "string", "pattern": "(?=a)"}, "#/pattern", "look-around"),
        ({"type": "object", "required": ["a"]}, "#/required", "all in properties"),
        ({"type": "object", "required": [["a"]]}, "#/required", "all in properties"),
        ({"type": "file"}, "#/type", "must be one of null, boolean"),
        ({"type": []}, "#/type", "must be one of"),
        ({"type": [["null"]]}, "#/type", "must be one of"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "#", "no integer of 18 digits is between 5 and 4"),
        ({"type": "integer", "minimum": 10**30}, "#", "no integer of 18 digits"),
        ({"type": "integer", "minimum": True}, "#/minimum", "must be of type number"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "#", "maxLength not less"),
        ({"type": "array", "minItems": -1}, "#", "minItems must be 0 or more"),
        ({"type": "array", "minItems": "1"}, "#/minItems", "must be of type integer"),
        ({"enum": []}, "#/enum", "no value"),
        ({"const": 1, "type": "string"}, "#/const", "no value of the type"),
        ({"anyOf": {}}, "#/anyOf", "must be of type array"),
        (False, "#", "false allows nothing"),
        ([], "#", "must be an object"),
        ({"$ref": "#/$defs/a"}, "#/$ref", "which is not in this schema"),
        ({"$ref": "other.json"}, "#/$ref", "not in this schema"),
        ({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}, "#/$defs/a/items/$ref", "recursion"),
        ({"type": "array", "items": {"$ref": "#"}}, "#/items/$ref", "recursion"),
        ({"type": "array", "items": {"$id": "x"}}, "#/items/$id", "\\$id"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_its_path(schema: object, path: str, why: str):
    with pytest.raises(RequestError, match=why) as refusal:
        parse_schema(json.dumps(schema))
    assert (refusal.value.field, refusal.value.value) == ("guided", path)


def test_what_is_nested_too_deep_is_refused():
    schema = '{"type": "array", "items": ' * 500 + "{}" + "}" * 500
    for guide in (GuidedJson(schema), GuidedRegex("(" * 9000 + ")" * 9000)):
        with pytest.raises(RequestError, match="too deep"):
            language_of(guide)
    with pytest.raises(RequestError, match="not JSON"):
        language_of(GuidedJson('{"items":' * 100_000))


@pytest.mark.parametrize("text", ["{", "", '{"const": NaN}', '{"const": 1e999}'])
def test_a_schema_that_is_no_json_is_refused(text: str):
    with pytest.raises(RequestError, match="the schema is not JSON"):
        language_of(GuidedJson(text))


@pytest.mark.parametrize("schema", [{"const": float("nan")}, {"x": {1, 2}}])
def test_a_schema_that_json_can_not_write_is_refused(schema: dict):
    with pytest.raises(RequestError, match="must be JSON"):
        GuidedJson(schema)


# other guides


def test_choices_are_matched_whole():
    machine = build_automaton(language_of(GuidedChoice(("yes", "yes, sir", "né"))))
    assert [machine.matches(t.encode()) for t in ("yes", "yes, sir", "né", "y", "yess")] == [True] * 3 + [False] * 2


def test_a_bad_pattern_is_refused_with_its_reason():
    with pytest.raises(RequestError, match=r"GuidedRegex\(pattern='a\('\): .*without"):
        language_of(GuidedRegex("a("))


@pytest.mark.parametrize("guide", [GuidedRegex("[x-z]"), GuidedChoice(("\ud800",)), GuidedJson({"anyOf": []})])
def test_a_guide_that_no_tokens_can_follow_fails_to_compile(guide):
    with pytest.raises(RequestError, match="no text matches it"):
        compile_grammar(guide, make_vocabulary([b"a", b"b"]))

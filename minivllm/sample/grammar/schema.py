"""From a JSON schema to the tree of documents that it allows.

Every document that the tree holds is valid under the schema. Not every valid document is in the tree: fields come in the
order of the schema, numbers and white space are bounded (`json_text.py`), an object with `properties` has no other
fields. What is supported, of JSON Schema 2020-12:

* `{}` and `true`: any document, nested at most `json_text.ANY_DEPTH` deep;
* `type`, one or a list of several, with the keywords of `KEYWORDS` beside it: `minimum`, `maximum` and their exclusive
  forms for integers; `minLength` and `maxLength`, or `pattern`, for strings; `items`, `minItems`, `maxItems`;
  `properties`, `required`, `additionalProperties`;
* `enum` and `const`, with or without `type`; `anyOf`;
* `$ref` to a place in the same schema (`$defs`, most often), unless it leads back to itself.

Words that only describe (`title`, `default`, ...) are passed over. Any other keyword raises `RequestError` with its path:
a constraint that is ignored would be a promise broken silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from minivllm.config import RequestError
from minivllm.sample.grammar import json_text
from minivllm.sample.grammar.json_text import LARGEST, MAX_DIGITS
from minivllm.sample.grammar.regex import PatternError, parse_regex
from minivllm.sample.grammar.syntax import Alt, Node, sequence

MAX_NESTING = 30
DESCRIPTIONS = {
    "$comment", "$schema", "$defs", "definitions", "default", "deprecated", "description", "examples", "readOnly",
    "title", "writeOnly",
}  # fmt: skip
KEYWORDS: dict[str, tuple[str, ...]] = {
    "null": (),
    "boolean": (),
    "number": (),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "string": ("minLength", "maxLength", "pattern"),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
"""The types, and the keywords known beside each."""
INSTEAD_OF_TYPES = {"$ref": ("$ref",), "anyOf": ("anyOf",), "const": ("const", "type"), "enum": ("enum", "type")}
"""The keywords that say by themselves what a document is, and what is known beside each."""

Schema = dict[str, Any]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_bound(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_reference(value: object) -> bool:
    return isinstance(value, str) and (value == "#" or value.startswith("#/"))


def _is_filled_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


Form = tuple[Callable[[object], bool], str]
FORMS: dict[str, Form] = {
    "$ref": (_is_reference, "lead to a place in this schema, such as '#/$defs/name'"),
    "pattern": (lambda value: isinstance(value, str), "be a text"),
    "properties": (lambda value: isinstance(value, dict), "be an object"),
    **dict.fromkeys(("anyOf", "enum"), (_is_filled_list, "be a list of at least one")),
    **dict.fromkeys(KEYWORDS["integer"], (_is_bound, f"be a number of {MAX_DIGITS} digits at most")),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), (_is_count, "be a whole number, 0 or more")),
}
ANY_FORM: Form = (lambda value: True, "")


def parse_schema(text: str) -> Node:
    """The tree of a schema's documents. Raises `RequestError` naming keyword and path of what is not supported."""
    try:
        schema = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise RequestError("guided", text[:80], f"the schema is not JSON: {error}") from error
    return _Translator(schema).translate(schema, "#", 0)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that JSON can hold")


def _finite(digits: str) -> float:
    return float(digits) if math.isfinite(float(digits)) else _no_number(digits)


def _refuse(path: str, why: str) -> RequestError:
    return RequestError("guided", path, why)


class _Translator:
    """Translates a schema and what it refers to; definitions that are used several times are translated once."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[str, Node] = {}
        self._open: list[str] = []  # references that are being followed

    def translate(self, schema: object, path: str, depth: int) -> Node:
        """The tree of one schema, which stands at `path`, `depth` deep."""
        if depth > MAX_NESTING:
            raise _refuse(path, f"is nested more than {MAX_NESTING} deep")
        if schema is True:
            return json_text.any_value()
        if not isinstance(schema, dict):
            raise _refuse(path, "must be an object, or true; false allows nothing")
        for keyword, known in INSTEAD_OF_TYPES.items():
            if keyword in schema:
                _check(schema, path, known, f"beside {keyword}")
                return self._without_types(keyword, schema, f"{path}/{keyword}", depth)
        if "type" not in schema:
            _check(schema, path, (), "without a type beside it")
            return json_text.any_value()
        types = _types(schema, path)
        known = ("type", *(keyword for name in types for keyword in KEYWORDS[name]))
        _check(schema, path, known, f"for type {' or '.join(types)}")
        return Alt(tuple(self._of_type(name, schema, path, depth) for name in types))

    def _without_types(self, keyword: str, schema: Schema, path: str, depth: int) -> Node:
        value = schema[keyword]
        if keyword == "$ref":
            return self._refer(value, path, depth)
        if keyword == "anyOf":
            return Alt(tuple(self.translate(option, f"{path}/{i}", depth + 1) for i, option in enumerate(value)))
        return _constants([value] if keyword == "const" else value, schema, path)

    def _refer(self, target: str, path: str, depth: int) -> Node:
        if target in self._open or target == "#":
            raise _refuse(path, f"leads to {target}, which leads back here: recursion is not supported")
        if target not in self._known:
            self._open.append(target)
            self._known[target] = self.translate(self._look_up(target, path), target, depth + 1)
            self._open.pop()
        return self._known[target]

    def _look_up(self, target: str, path: str) -> object:
        """What a JSON pointer leads to (RFC 6901)."""
        here = self._root
        for part in target.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(here, dict) or name not in here:
                raise _refuse(path, f"leads to {target}, which is not there")
            here = here[name]
        return here

    def _of_type(self, name: str, schema: Schema, path: str, depth: int) -> Node:
        match name:
            case "object":
                return self._object(schema, path, depth)
            case "array":
                item = self.translate(schema.get("items", True), f"{path}/items", depth + 1)
                return json_text.array(item, *_counts(schema, path, "minItems", "maxItems"))
            case "string":
                return _string(schema, path)
            case "integer":
                return _integer(schema, path)
            case "number":
                return json_text.number()
        return json_text.BOOLEAN if name == "boolean" else json_text.NULL

    def _object(self, schema: Schema, path: str, depth: int) -> Node:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(n, str) and n in properties for n in required):
            raise _refuse(f"{path}/required", "must be a list of names that are all in properties")
        more = schema.get("additionalProperties", True)
        if not properties and more is not False:
            return json_text.mapping(self.translate(more, f"{path}/additionalProperties", depth + 1))
        fields = [
            (name, self.translate(value, f"{path}/properties/{name}", depth + 1), name in required)
            for name, value in properties.items()
        ]
        return json_text.struct(fields)


def _check(schema: Schema, path: str, known: tuple[str, ...], where: str) -> None:
    """Refuse the first keyword that is neither known here nor merely a description, or whose value has another form."""
    for keyword, value in schema.items():
        if keyword in DESCRIPTIONS or (keyword == "$id" and path == "#"):  # further in, $id changes where "#" leads
            continue
        if keyword not in known:
            raise _refuse(f"{path}/{keyword}", f"the keyword {keyword} is not supported {where}")
        is_good, form = FORMS.get(keyword, ANY_FORM)
        if not is_good(value):
            raise _refuse(f"{path}/{keyword}", f"must {form}")


def _types(schema: Schema, path: str) -> list[str]:
    """The types that a schema names, one or a list of them."""
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not types or not all(isinstance(name, str) and name in KEYWORDS for name in types):
        raise _refuse(f"{path}/type", f"must be one of {', '.join(KEYWORDS)}, or a list of them")
    return types


def _integer(schema: Schema, path: str) -> Node:
    low = max(math.ceil(schema.get("minimum", -LARGEST)), math.floor(schema.get("exclusiveMinimum", -LARGEST - 1)) + 1)
    high = min(math.floor(schema.get("maximum", LARGEST)), math.ceil(schema.get("exclusiveMaximum", LARGEST + 1)) - 1)
    if low > high:
        raise _refuse(path, f"no integer of {MAX_DIGITS} digits is between {low} and {high}")
    return json_text.integer(low, high)


def _string(schema: Schema, path: str) -> Node:
    if "pattern" not in schema:
        return json_text.string(*_counts(schema, path, "minLength", "maxLength"))
    path = f"{path}/pattern"
    if "minLength" in schema or "maxLength" in schema:
        raise _refuse(path, "is not supported beside minLength or maxLength: write the lengths into the pattern")
    try:
        inside = parse_regex(schema["pattern"], json_text.string_characters, search=True)
    except PatternError as error:
        raise _refuse(path, str(error)) from error
    return sequence('"', inside, '"')


def _counts(schema: Schema, path: str, lowest: str, highest: str) -> tuple[int, int | None]:
    low, high = schema.get(lowest, 0), schema.get(highest)
    if high is not None and low > high:
        raise _refuse(f"{path}/{highest}", f"is less than {lowest}")
    return low, high


def _constants(values: list[object], schema: Schema, path: str) -> Node:
    """Those of some values that have a type which the schema names, if it names any."""
    types = _types(schema, path.rpartition("/")[0]) if "type" in schema else list(KEYWORDS)
    fitting = [value for value in values if any(_is_a(value, name) for name in types)]
    if not fitting:
        raise _refuse(path, "holds no value of the type beside it")
    return Alt(tuple(map(json_text.constant, fitting)))


def _is_a(value: object, type_name: str) -> bool:
    """Whether a JSON value has a type of JSON Schema; true and false are no numbers, and 1.0 is an integer."""
    if isinstance(value, bool) or value is None:
        return type_name == ("null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return type_name == "number" or (type_name == "integer" and value == int(value))
    return type_name == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")

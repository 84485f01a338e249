"""From a JSON schema to the tree of documents that it allows.

Every document that the tree holds is valid under the schema. Not every valid document is in the tree: fields come in the
order of the schema, numbers and white space are bounded (`json_text.py`), an object with `properties` has no other
fields. What is supported, of JSON Schema 2020-12:

* `{}` and `true`: any document, nested at most `json_text.ANY_DEPTH` deep;
* `type`, one or a list of several, with the keywords of `TYPES` beside it: `minimum`, `maximum` and their exclusive
  forms for integers; `minLength` and `maxLength`, or `pattern`, for strings; `items`, `minItems`, `maxItems`;
  `properties`, `required`, `additionalProperties`;
* `enum` and `const`, with or without `type`; `anyOf`;
* `$ref` to a place in the same schema (`$defs`, most often), unless it leads back to itself.

Words that only describe (`title`, `default`, ...) are passed over. Any other keyword raises `RequestError` with its path:
a constraint that is ignored would be a promise broken silently.
"""

from __future__ import annotations

import json
from math import ceil, floor
from typing import Any

from minivllm.config import RequestError
from minivllm.sample.grammar import json_text
from minivllm.sample.grammar.json_text import LARGEST, MAX_DIGITS
from minivllm.sample.grammar.regex import PatternError, parse_regex
from minivllm.sample.grammar.syntax import Alt, Node, concat

DESCRIPTIONS = {
    "$comment", "$schema", "$defs", "definitions", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly",
}  # fmt: skip
TYPES: dict[str, tuple[type | tuple[type, ...], tuple[str, ...]]] = {
    "null": (type(None), ()),
    "boolean": (bool, ()),
    "number": ((int, float), ()),
    "integer": (int, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "string": (str, ("minLength", "maxLength", "pattern")),
    "array": (list, ("items", "minItems", "maxItems")),
    "object": (dict, ("properties", "required", "additionalProperties")),
}
"""What Python reads each type as, and the keywords known beside it."""
INSTEAD_OF_TYPES = {"$ref": ("$ref",), "anyOf": ("anyOf",), "const": ("const", "type"), "enum": ("enum", "type")}
"""The keywords that say by themselves what a document is, and what is known beside each."""
VALUES = {"$ref": "string", "pattern": "string", "properties": "object"}
VALUES |= dict.fromkeys(("required", "anyOf", "enum"), "array")
VALUES |= dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), "integer")
VALUES |= dict.fromkeys(TYPES["integer"][1], "number")
"""The type of each keyword's value, unless any will do."""

Schema = dict[str, Any]


def parse_schema(text: str) -> Node:
    """The tree of a schema's documents. Raises `RequestError` naming keyword and path of what is not supported."""
    try:
        schema = json.loads(text)
        json.dumps(schema, allow_nan=False)  # Python also reads NaN and 1e999, which JSON can't hold
    except (ValueError, RecursionError) as error:
        raise RequestError("guided", text[:80], f"the schema is not JSON: {error}") from error
    return _Translator(schema).translate(schema, "#")


def _refuse(path: str, why: str) -> RequestError:
    return RequestError("guided", path, why)


class _Translator:
    """Translates a schema and what it refers to; definitions that are used several times are translated once."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[str, Node] = {}
        self._open = ["#"]  # references that are being followed

    def translate(self, schema: object, path: str) -> Node:
        """The tree of one schema, which stands at `path`."""
        if schema is True:
            return json_text.any_value()
        if not isinstance(schema, dict):
            raise _refuse(path, "must be an object, or true; false allows nothing")
        for keyword, known in INSTEAD_OF_TYPES.items():
            if keyword in schema:
                _check(schema, path, known, f"beside {keyword}")
                return self._without_types(keyword, schema, f"{path}/{keyword}")
        if "type" not in schema:
            _check(schema, path, (), "without a type beside it")
            return json_text.any_value()
        types = _types(schema, path)
        known = ("type", *(keyword for name in types for keyword in TYPES[name][1]))
        _check(schema, path, known, f"for type {' or '.join(types)}")
        return Alt(tuple(self._of_type(name, schema, path) for name in types))

    def _without_types(self, keyword: str, schema: Schema, path: str) -> Node:
        value = schema[keyword]
        if keyword == "$ref":
            return self._refer(value, path)
        if keyword == "anyOf":
            return Alt(tuple(self.translate(option, f"{path}/{i}") for i, option in enumerate(value)))
        return _constants([value] if keyword == "const" else value, schema, path)

    def _refer(self, target: str, path: str) -> Node:
        if target in self._open:
            raise _refuse(path, f"leads to {target}, which leads back here: recursion is not supported")
        if target not in self._known:
            self._open.append(target)
            self._known[target] = self.translate(self._look_up(target, path), target)
            self._open.pop()
        return self._known[target]

    def _look_up(self, target: str, path: str) -> object:
        """What a JSON pointer leads to (RFC 6901)."""
        here: object = {"#": self._root}
        for part in target.split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(here, dict) or name not in here:
                raise _refuse(path, f"leads to {target}, which is not in this schema")
            here = here[name]
        return here

    def _of_type(self, name: str, schema: Schema, path: str) -> Node:
        match name:
            case "object":
                return self._object(schema, path)
            case "array":
                item = self.translate(schema.get("items", True), f"{path}/items")
                return json_text.array(item, *_counts(schema, path, "minItems", "maxItems"))
            case "string":
                return _string(schema, path)
            case "integer":
                return _integer(schema, path)
            case "number":
                return json_text.NUMBER
        return json_text.BOOLEAN if name == "boolean" else json_text.NULL

    def _object(self, schema: Schema, path: str) -> Node:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if any(name not in list(properties) for name in required):
            raise _refuse(f"{path}/required", "must be a list of names that are all in properties")
        more = schema.get("additionalProperties", True)
        if not properties and more is not False:
            return json_text.mapping(self.translate(more, f"{path}/additionalProperties"))
        values = {name: self.translate(value, f"{path}/properties/{name}") for name, value in properties.items()}
        return json_text.struct([(name, value, name in required) for name, value in values.items()])


def _check(schema: Schema, path: str, known: tuple[str, ...], where: str) -> None:
    """Refuse the first keyword that is neither known here nor merely a description, or whose value has another type."""
    for keyword, value in schema.items():
        if keyword in DESCRIPTIONS or (keyword == "$id" and path == "#"):  # further in, $id changes where "#" leads
            continue
        if keyword not in known:
            raise _refuse(f"{path}/{keyword}", f"the keyword {keyword} is not supported {where}")
        if keyword in VALUES and not _is_a(value, VALUES[keyword]):
            raise _refuse(f"{path}/{keyword}", f"must be of type {VALUES[keyword]}")


def _types(schema: Schema, path: str) -> list[str]:
    """The types that a schema names, one or a list of them. Beside "number", "integer" says nothing."""
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not types or not all(isinstance(name, str) and name in TYPES for name in types):
        raise _refuse(f"{path}/type", f"must be one of {', '.join(TYPES)}, or a list of them")
    return [name for name in types if name != "integer" or "number" not in types]


def _integer(schema: Schema, path: str) -> Node:
    low = max(ceil(schema.get("minimum", -LARGEST)), floor(schema.get("exclusiveMinimum", -LARGEST - 1)) + 1, -LARGEST)
    high = min(floor(schema.get("maximum", LARGEST)), ceil(schema.get("exclusiveMaximum", LARGEST + 1)) - 1, LARGEST)
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
    return concat('"', inside, '"')


def _counts(schema: Schema, path: str, lowest: str, highest: str) -> tuple[int, int | None]:
    low, high = schema.get(lowest, 0), schema.get(highest)
    if low < 0 or (high is not None and high < low):
        raise _refuse(path, f"{lowest} must be 0 or more, and {highest} not less")
    return low, high


def _constants(values: list[object], schema: Schema, path: str) -> Node:
    """Those of some values that have a type which the schema names, if it names any."""
    types = _types(schema, path.rpartition("/")[0]) if "type" in schema else list(TYPES)
    fitting = [value for value in values if any(_is_a(value, name) for name in types)]
    if not fitting:
        raise _refuse(path, "holds no value of the type beside it")
    return Alt(tuple(map(json_text.constant, fitting)))


def _is_a(value: object, type_name: str) -> bool:
    """Whether a value has a type of JSON: true and false, which Python takes for integers, are none of its numbers."""
    return isinstance(value, TYPES[type_name][0]) and (isinstance(value, bool) == (type_name == "boolean"))

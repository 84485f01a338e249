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
from typing import NoReturn

from minivllm.config import RequestError
from minivllm.sample.grammar import json_text
from minivllm.sample.grammar.regex import PatternError, parse_regex
from minivllm.sample.grammar.syntax import Alt, Node, sequence

MAX_NESTING = 30
DESCRIPTIONS = {
    "$comment", "$schema", "$defs", "definitions", "default", "deprecated", "description", "examples",
    "readOnly", "title", "writeOnly",
}  # fmt: skip
KEYWORDS = {
    "null": set(),
    "boolean": set(),
    "number": set(),
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "string": {"minLength", "maxLength", "pattern"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""The types, and the keywords known beside each."""

Schema = dict[str, object]


def parse_schema(text: str) -> Node:
    """The tree of a schema's documents. Raises `RequestError` naming keyword and path of what is not supported."""
    try:
        schema = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise RequestError("guided", text[:80], f"the schema is not JSON: {error}") from error
    return _Translator(schema).translate(schema, "#", 0)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that JSON can hold")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_constant(digits)


def _refuse(path: str, why: str) -> RequestError:
    return RequestError("guided", path, why)


class _Translator:
    """Translates a schema and what it refers to; definitions that are used several times are translated once."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[str, Node] = {}
        self._open: list[str] = []  # references that are being followed
        self._types: dict[str, Callable[[Schema, str, int], Node]] = {
            "null": lambda schema, path, depth: json_text.NULL,
            "boolean": lambda schema, path, depth: json_text.BOOLEAN,
            "number": lambda schema, path, depth: json_text.number(),
            "integer": self._integer,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }

    def translate(self, schema: object, path: str, depth: int) -> Node:
        """The tree of one schema, which stands at `path`, `depth` deep."""
        if depth > MAX_NESTING:
            raise _refuse(path, f"is nested more than {MAX_NESTING} deep")
        if schema is True:
            return json_text.any_value()
        if not isinstance(schema, dict):
            raise _refuse(path, "must be an object, or true; false allows nothing")
        for keyword, form in (
            ("$ref", self._ref),
            ("anyOf", self._any_of),
            ("const", self._const),
            ("enum", self._enum),
        ):
            if keyword in schema:
                _only(
                    schema, path, {keyword, "type"} if keyword in ("const", "enum") else {keyword}, f"beside {keyword}"
                )
                return form(schema, f"{path}/{keyword}", depth)
        types = _types(schema, path)
        if types is None:
            _only(schema, path, set(), "without a type beside it")
            return json_text.any_value()
        _only(schema, path, {"type"}.union(*(KEYWORDS[name] for name in types)), f"for type {' or '.join(types)}")
        return Alt(tuple(self._types[name](schema, path, depth) for name in types))

    def _ref(self, schema: Schema, path: str, depth: int) -> Node:
        target = schema["$ref"]
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise _refuse(path, "must lead to a place in this schema: '#/$defs/name'")
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

    def _any_of(self, schema: Schema, path: str, depth: int) -> Node:
        options = schema["anyOf"]
        if not isinstance(options, list) or not options:
            raise _refuse(path, "must be a list of at least one schema")
        return Alt(tuple(self.translate(option, f"{path}/{i}", depth + 1) for i, option in enumerate(options)))

    def _const(self, schema: Schema, path: str, depth: int) -> Node:
        return _constants([schema["const"]], schema, path)

    def _enum(self, schema: Schema, path: str, depth: int) -> Node:
        if not isinstance(schema["enum"], list):
            raise _refuse(path, "must be a list")
        return _constants(schema["enum"], schema, path)

    def _integer(self, schema: Schema, path: str, depth: int) -> Node:
        low = max(
            math.ceil(_bound(schema, path, "minimum", -json_text.LARGEST)),
            math.floor(_bound(schema, path, "exclusiveMinimum", -json_text.LARGEST - 1)) + 1,
        )
        high = min(
            math.floor(_bound(schema, path, "maximum", json_text.LARGEST)),
            math.ceil(_bound(schema, path, "exclusiveMaximum", json_text.LARGEST + 1)) - 1,
        )
        if low > high:
            raise _refuse(path, f"no integer is between {low} and {high}")
        return json_text.integer(low, high)

    def _string(self, schema: Schema, path: str, depth: int) -> Node:
        if "pattern" not in schema:
            return json_text.string(*_counts(schema, path, "minLength", "maxLength"))
        path = f"{path}/pattern"
        if "minLength" in schema or "maxLength" in schema:
            raise _refuse(path, "is not supported beside minLength or maxLength: write the lengths into the pattern")
        if not isinstance(schema["pattern"], str):
            raise _refuse(path, "must be a text")
        try:
            inside = parse_regex(schema["pattern"], json_text.string_characters, search=True)
        except PatternError as error:
            raise _refuse(path, str(error)) from error
        return sequence('"', inside, '"')

    def _array(self, schema: Schema, path: str, depth: int) -> Node:
        item = self.translate(schema.get("items", True), f"{path}/items", depth + 1)
        return json_text.array(item, *_counts(schema, path, "minItems", "maxItems"))

    def _object(self, schema: Schema, path: str, depth: int) -> Node:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise _refuse(f"{path}/properties", "must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
            raise _refuse(f"{path}/required", "must be a list of names that are all in properties")
        more = schema.get("additionalProperties", True)
        if not properties and more is not False:
            return json_text.mapping(self.translate(more, f"{path}/additionalProperties", depth + 1))
        fields = [
            (name, self.translate(value, f"{path}/properties/{name}", depth + 1), name in required)
            for name, value in properties.items()
        ]
        return json_text.struct(fields)


def _only(schema: Schema, path: str, known: set[str], where: str) -> None:
    """Refuse the first keyword that is neither known here nor merely a description."""
    for keyword in schema:
        if keyword == "$id" and path == "#":  # further in it would change where "#" leads
            continue
        if keyword not in known and keyword not in DESCRIPTIONS:
            raise _refuse(f"{path}/{keyword}", f"the keyword {keyword} is not supported {where}")


def _types(schema: Schema, path: str) -> list[str] | None:
    """The types named by a schema, if it names any."""
    if "type" not in schema:
        return None
    named = schema["type"]
    types = named if isinstance(named, list) else [named]
    known = [name for name in types if isinstance(name, str) and name in KEYWORDS]
    if not types or known != types:
        raise _refuse(f"{path}/type", f"must be one of {', '.join(KEYWORDS)}, or a list of them")
    return known


def _bound(schema: Schema, path: str, keyword: str, default: int) -> float:
    value = schema.get(keyword, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > json_text.LARGEST + 1:
        raise _refuse(f"{path}/{keyword}", f"must be a number of {json_text.MAX_DIGITS} digits at most")
    return value


def _counts(schema: Schema, path: str, lowest: str, highest: str) -> tuple[int, int | None]:
    low, high = schema.get(lowest, 0), schema.get(highest)
    for keyword, value in ((lowest, low), (highest, high)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise _refuse(f"{path}/{keyword}", "must be a whole number, 0 or more")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        raise _refuse(f"{path}/{highest}", f"is less than {lowest}")
    return low, high  # type: ignore[return-value]


def _constants(values: list[object], schema: Schema, path: str) -> Node:
    """Those of some values that have a type which the schema names, if it names any."""
    types = _types(schema, path.rpartition("/")[0])
    fitting = [value for value in values if types is None or any(_is_a(value, name) for name in types)]
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

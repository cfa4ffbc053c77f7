"""A value that a JSON schema allows: what a constrained model would say. Pure; the same each time.

It knows what function parameters and structured outputs use: types, objects, arrays, enum and const, references,
`anyOf` and `oneOf` (the first), `allOf` (merged), bounds of numbers, strings and arrays, and some formats. Engines
refuse what their grammar compiler does not know; so does this, `pattern` first of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, floor
from typing import Any

_DEPTH_MAX = 64
_OPTIONAL_DEPTH_MAX = 4
"""Below it optional properties are left out: a recursive schema has an end only without them."""
_ITEMS_MAX = 1000
_LENGTH_MAX = 100_000
_FORMATS = {
    "date-time": "2026-01-02T03:04:05Z",
    "date": "2026-01-02",
    "time": "03:04:05Z",
    "duration": "P1D",
    "email": "someone@example.org",
    "hostname": "example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uuid": "8f14e45f-ceea-467f-a0e6-1b2c3d4e5f60",
    "uri": "https://example.org/",
}
_UNKNOWN = ("pattern", "not", "if", "patternProperties", "contains", "propertyNames", "dependentSchemas")
_MERGED_LISTS = ("required",)


class CannotMeetSchema(ValueError):
    """No value was found; the text says which part of the schema is not known or cannot be met."""


def instance_of(schema: object, word: Callable[[int], str]) -> Any:
    """A value that `schema` allows. Free strings are `word(0)`, `word(1)`, … Raises CannotMeetSchema."""
    return _Maker(schema, word).value(schema, 0)


class _Maker:
    def __init__(self, root: object, word: Callable[[int], str]) -> None:
        self._root = root
        self._word = word
        self._words = 0

    def value(self, schema: object, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise CannotMeetSchema(f"the schema nests deeper than {_DEPTH_MAX}")
        if schema is True or schema == {}:
            return self._text({})
        if not isinstance(schema, Mapping):
            raise CannotMeetSchema(f"a schema must be an object, not {schema!r:.80}")
        for name in _UNKNOWN:
            if name in schema:
                raise CannotMeetSchema(f"{name} is not supported in schemas")
        if "$ref" in schema:
            rest = {name: part for name, part in schema.items() if name != "$ref"}
            return self.value({"allOf": [self._referred(schema["$ref"])], **rest}, depth + 1)
        if "allOf" in schema:
            return self.value(self._merged(schema, depth), depth + 1)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        for name in ("anyOf", "oneOf"):
            if schema.get(name):
                return self._one_of(schema, name, depth)
        return self._typed(schema, depth)

    def _one_of(self, schema: Mapping[str, Any], name: str, depth: int) -> Any:
        rest = {key: part for key, part in schema.items() if key != name}
        # The last first when it is deep: in recursive types that is, by habit, the one that ends (a leaf, or null).
        options = schema[name] if depth < _OPTIONAL_DEPTH_MAX else list(reversed(schema[name]))
        return self.value({"allOf": [options[0]], **rest}, depth + 1)

    def _typed(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else "string")
        match kind[0] if isinstance(kind, list) and kind else kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._text(schema)
            case "integer":
                return int(_number(schema, step=1))
            case "number":
                return _number(schema, step=0.5)
            case "boolean":
                return True
            case "null":
                return None
        raise CannotMeetSchema(f"type {kind!r:.80} is none of JSON Schema's")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise CannotMeetSchema("properties must be an object and required a list")
        wanted = required if depth >= _OPTIONAL_DEPTH_MAX else list(dict.fromkeys([*properties, *required]))
        return {name: self.value(properties.get(name, {}), depth + 1) for name in wanted}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first = schema.get("prefixItems") or []
        least = max(int(schema.get("minItems", 0)), len(first))
        usual = 0 if depth >= _OPTIONAL_DEPTH_MAX or schema.get("items") is False else 1
        count = min(max(least, usual), int(schema.get("maxItems", max(least, usual))))
        if least > count or count > _ITEMS_MAX:
            raise CannotMeetSchema(f"an array of {least} items is not possible or over {_ITEMS_MAX}")
        schemas = [*first[:count], *[schema.get("items", {})] * (count - len(first[:count]))]
        return [self.value(item, depth + 1) for item in schemas]

    def _text(self, schema: Mapping[str, Any]) -> str:
        if known := _FORMATS.get(schema.get("format", "")):
            return known
        text = self._word(self._words)
        self._words += 1
        least, most = int(schema.get("minLength", 0)), int(schema.get("maxLength", _LENGTH_MAX))
        if least > min(most, _LENGTH_MAX):
            raise CannotMeetSchema(f"a text of {least} characters is not possible or over {_LENGTH_MAX}")
        return (text * (least // len(text) + 1))[: max(least, len(text))][:most]

    def _referred(self, name: object) -> Any:
        if not isinstance(name, str) or not name.startswith("#"):
            raise CannotMeetSchema(f"$ref {name!r:.80} does not point into the schema itself")
        found: Any = self._root
        for part in filter(None, name.removeprefix("#").split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise CannotMeetSchema(f"$ref {name} points to nothing")
            found = found[key]
        return found

    def _merged(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """`schema` and all parts of its `allOf` as one."""
        whole: dict[str, Any] = {}
        for part in [*schema["allOf"], {name: value for name, value in schema.items() if name != "allOf"}]:
            if depth > _DEPTH_MAX or not isinstance(part, Mapping):
                raise CannotMeetSchema("allOf must hold schemas, and its references must end")
            for name, value in part.items():
                if name == "properties" and isinstance(value, Mapping):
                    whole[name] = {**whole.get(name, {}), **value}
                elif name in _MERGED_LISTS and isinstance(value, list):
                    whole[name] = [*whole.get(name, []), *value]
                else:
                    whole[name] = value
        return whole


def _number(schema: Mapping[str, Any], step: float) -> float:
    """The number nearest to 7 within the bounds."""
    multiple = schema.get("multipleOf")
    step = float(multiple) if multiple else step
    low, high = -1e15, 1e15
    if "minimum" in schema:
        low = max(low, float(schema["minimum"]))
    if isinstance(bound := schema.get("exclusiveMinimum"), int | float) and not isinstance(bound, bool):
        low = max(low, bound + step if step >= 1 else bound + min(step, 1e-6))
    if "maximum" in schema:
        high = min(high, float(schema["maximum"]))
    if isinstance(bound := schema.get("exclusiveMaximum"), int | float) and not isinstance(bound, bool):
        high = min(high, bound - step if step >= 1 else bound - min(step, 1e-6))
    value = min(max(7.0, low), high)
    if multiple or step == 1:
        value = ceil(value / step) * step if ceil(value / step) * step <= high else floor(value / step) * step
    if not low <= value <= high:
        raise CannotMeetSchema(f"no number is between {low:g} and {high:g}")
    return value

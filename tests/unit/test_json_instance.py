"""Values for JSON schemas: valid where the schema is known, refused where it is not."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter

from serai.engine_emulator.json_instance import CannotMeetSchema, instance_of


def word(index: int) -> str:
    return f"kato{index}"


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Leaf(BaseModel):
    name: str = Field(min_length=9, max_length=12)
    weight: float = Field(gt=10, lt=10.5)


class Tree(BaseModel):
    leaf: Leaf
    colours: list[Colour] = Field(min_length=3)
    place: tuple[int, str]
    left: Tree | None = None
    children: list[Tree]
    kind: Literal["oak"]
    count: int = Field(multiple_of=5, ge=11)
    few: list[int] = Field(max_length=0)


class Calls(BaseModel):
    value: str | dict[str, int]
    flag: bool | None


@pytest.mark.parametrize("model", [Leaf, Tree, Calls])
def test_models_with_references_bounds_and_recursion_read_what_is_made_for_them(model: type[BaseModel]) -> None:
    made = instance_of(model.model_json_schema(), word)
    assert model.model_validate(made, strict=False)
    assert made == instance_of(model.model_json_schema(), word), "the same each time"


def test_all_properties_are_there_until_it_gets_deep() -> None:
    made = instance_of(Tree.model_json_schema(), word)
    assert isinstance(made["children"][0], dict)
    depth, here = 0, made
    while here.get("children"):
        depth, here = depth + 1, here["children"][0]
    assert depth < 6


@st.composite
def bounds(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(["integer", "number", "string", "array"]))
    low = draw(st.integers(-50, 50))
    high = low + draw(st.integers(2, 20))
    match kind:
        case "string":
            return kind, {"type": kind, "minLength": abs(low), "maxLength": abs(low) + high - low}
        case "array":
            return kind, {"type": kind, "minItems": abs(low), "maxItems": abs(low) + high - low}
        case _:
            names = draw(st.sampled_from([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]))
            return kind, {"type": kind, names[0]: low, names[1]: high}


@given(bounds())
def test_bounds_are_kept(case: tuple[str, dict[str, Any]]) -> None:
    kind, schema = case
    made = instance_of(schema, word)
    size = len(made) if kind in ("string", "array") else made
    limits = {name: value for name, value in schema.items() if name != "type"}
    strictly = any(name.startswith("exclusive") for name in limits)
    low, high = limits.values()
    assert low < size < high if strictly else low <= size <= high
    assert kind != "integer" or isinstance(made, int)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern is not supported"),
        ({"$ref": "#/$defs/nothing"}, "points to nothing"),
        ({"$ref": "other.json"}, "does not point into the schema"),
        ({"$ref": "#"}, "deeper than"),
        ({"type": "wrong"}, "none of JSON Schema's"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no number"),
        ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "no number"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "not possible"),
        ({"type": "array", "minItems": 10_000}, "not possible"),
        ("string", "must be an object"),
    ],
)
def test_what_cannot_be_met_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(CannotMeetSchema, match=why):
        instance_of(schema, word)


def test_unions_and_formats() -> None:
    schema = {"allOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"enum": [4, 5]}}}]}
    assert instance_of(schema, word) == {"a": None, "b": 4}
    assert instance_of({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, word) is True
    made = instance_of({"type": "string", "format": "date-time"}, word)
    assert TypeAdapter(Any).validate_python(made) == "2026-01-02T03:04:05Z"

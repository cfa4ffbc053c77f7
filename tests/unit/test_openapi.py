"""The OpenAPI document tells of all that is served, and holds together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from serai.ingress.access import Access
from serai.ingress.cors import EXPOSED
from serai.ingress.endpoints import BY_PATH, Body, Dialect
from serai.ingress.openapi import openapi_document
from serai.ingress.service import Ingress
from serai.ingress.settings import IngressSettings
from serai.runtime.telemetry import Tracing
from unit.fakes import FakeBus

DOCUMENT = json.loads(openapi_document())


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from references(inner)


def test_all_references_lead_somewhere() -> None:
    found = set(references(DOCUMENT))
    assert found
    for reference in found:
        place = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_each_endpoint_is_described_as_it_is() -> None:
    for path, endpoint in BY_PATH.items():
        operation = DOCUMENT["paths"][path]["post"]
        (media,) = operation["requestBody"]["content"]
        assert media == ("application/json" if endpoint.body is Body.JSON else "multipart/form-data")
        schema = operation["requestBody"]["content"][media]["schema"]
        assert "model" in schema["required"]
        assert set(schema["required"]) <= set(schema["properties"])
        assert ("stream" in schema["properties"]) == endpoint.streams
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) == endpoint.streams
        error = operation["responses"]["400"]["content"]["application/json"]["schema"]["anyOf"][0]["$ref"]
        assert error.endswith("/AnthropicError" if endpoint.dialect is Dialect.ANTHROPIC else "/Error")
        assert {"400", "401", "403", "404", "413", "415", "429", "500", "502", "503", "504"} <= set(
            operation["responses"]
        )


def test_no_field_is_forbidden() -> None:
    assert b'"additionalProperties":false' not in openapi_document()


def test_names_of_operations_are_unique() -> None:
    names = [
        operation["operationId"]
        for path in DOCUMENT["paths"].values()
        for operation in path.values()
        if isinstance(operation, dict) and "operationId" in operation
    ]
    assert len(names) == len(set(names)) == len(BY_PATH)


def test_headers_that_are_described_are_those_that_pages_may_see() -> None:
    assert set(DOCUMENT["components"]["headers"]) == set(EXPOSED)


def test_every_route_is_described() -> None:
    access = Access(None, anonymous=True)
    ingress = Ingress(IngressSettings(anonymous=True), FakeBus(), access, Tracing("test", None, 0.0))
    described = {
        (method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item if method != "parameters"
    }
    assert set(ingress._routes._fixed) <= described
    for method, pattern, _ in ingress._routes._patterns:
        assert any(known == method and pattern.fullmatch(path) for known, path in described)
